"""Wraps Dynamo: ``torch.compile``, its settings and caches, wrappers of modules, and dynamic shapes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch  # as in Dynamo itself

import torch
from torch.autograd import forward_ad
from torch.distributions import Distribution

from compile_callbacks._torch import ports, torch_2_11
from compile_callbacks._torch.graphs import is_wrapper_subclass
from compile_callbacks._torch.ports import optional

SHARES_RECOMPILE_LIMIT = "isolate_recompiles" not in inspect.signature(torch.compile).parameters
"""Whether two configs of one code object share a ``recompile_limit``, as before torch 2.13."""


def control_flow() -> tuple[type[Exception], ...]:
    """Return exceptions of Dynamo that pass through a backend without being failures. Most request a graph break."""
    from torch._dynamo import exc

    return exc.RestartAnalysis, exc.SkipFrame, *exc.exceptions_allowed_to_be_fallback


@optional("dynamo settings", lambda: True)
def validate_arguments(validates: bool) -> bool:
    """Switch the argument validation of ``torch.distributions``, which breaks graphs, and return whether it was on.

    The first ``torch.compile`` of a process also switches it off. ``cache_clear`` lets the user's next one do so.
    """
    before = Distribution._validate_args
    Distribution.set_default_validate_args(validates)
    torch._dynamo.eval_frame.TorchPatcher.patch.cache_clear()
    return before


@contextlib.contextmanager
def trace_settings(
    asked: Mapping[str, Any], *, limit_factor: int, guards_hooks: bool, frozen: bool
) -> Iterator[Sequence[str]]:
    """Within the ``with`` block, Dynamo traces with the ``asked`` settings, and with these.

    torch holds its compile lock, so threads wait. Yields the list of `frames_with_constant_draws`.

    - ``recompile_limit`` is multiplied by ``limit_factor``.
    - Hooks of modules get guards if ``guards_hooks``. By default, Dynamo does not notice the first hook of a module.
    - Dynamo deletes its weak references to weights when the compile ends. By default, it does so for its own backends
      only, and ``module.cpu()`` then fails for tensor subclasses.
    - If the weights are ``frozen``, Inductor's ``freezing`` is set globally, because Dynamo ignores
      ``options={"freezing": True}``. This is safe, because `WeightWatch` checks frozen weights.
    - A warning is ignored: Dynamo reads ``.grad`` of each input, and torch warns if the input is the output of another
      target. The user's code does not cause this warning.
    """
    from torch._dynamo import config
    from torch._inductor import config as inductor_config

    settings = {"recompile_limit": limit_factor * config.recompile_limit, "invalidate_compile_context_weakrefs": True}
    settings |= asked
    if guards_hooks:
        settings["skip_nnmodule_hook_guards"] = False
    settings |= torch_2_11.trace_settings(frozen=frozen)
    for name in [name for name in settings if not hasattr(config, name)]:
        ports.note("dynamo settings", AttributeError(f"there is no torch._dynamo.config.{name}"))
        del settings[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        if torch_2_11.IS_2_11 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            stack.enter_context(ports.optional_block("odd gradients", without_odd_gradients))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        if frozen:
            stack.enter_context(inductor_config.patch(freezing=True))
        yield stack.enter_context(ports.optional_block("constant draws", frames_with_constant_draws, ()))


# Each call of a target compares these values. As methods of C objects, they need no Python frame.

hooks_registered: Callable[[], int] = functools.partial(
    operator.attrgetter("next_id"), torch.utils.hooks.RemovableHandle
)
"""Returns a number that increases with each hook on any module or tensor of the process."""


@optional("modes", lambda: (lambda: None, lambda: -1))
def transform_checks() -> tuple[Callable[[], Any], Callable[[], int]]:
    """Return two functions: for the innermost transform of `torch.func`, and for the level of forward-mode AD.

    Without them, the first is ``None`` and the second is -1.

    Workaround (until torch has public functions for transforms and for the level).
    """
    level = functools.partial(operator.attrgetter("_current_level"), forward_ad)
    level()
    return torch._C._functorch.peek_interpreter_stack, level


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode AD is active. Dynamo does not compile within them."""
    transform, level = transform_checks()
    return transform() is not None or level() >= 0


def has_call_hooks(module: torch.nn.Module, *, own: bool = True) -> bool:
    """Return whether a module or its submodules have forward or backward hooks."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in module.modules()
        if own or m is not module
    )


def without_odd_gradients() -> contextlib.AbstractContextManager[Any]:
    """Within the ``with`` block, Dynamo ignores gradients on which it would fail, so it can compile after a backward.

    Workaround (until FSDP1 is no longer supported): while FSDP1 has gathered a weight, the gradient of the previous
    step is still sharded, and Dynamo fails with "attempting to assign a gradient of size ..." (2.11 to 2.15).

    Workaround (torch<2.12): for gradients of tensor subclasses, Dynamo fails with "Expected SubclassSymbolicContext".
    """
    from torch._subclasses import meta_utils

    safe_grad = meta_utils.safe_grad

    def plain_grad(tensor: Any) -> Any:
        grad = safe_grad(tensor)
        odd = grad is not None and (grad.shape != tensor.shape or is_wrapper_subclass(grad))
        return None if odd else grad

    return patch.object(meta_utils, "safe_grad", plain_grad)


@contextlib.contextmanager
def frames_with_constant_draws() -> Iterator[list[str]]:
    """Yield a list of the functions for which torch computes random numbers only once, while it traces them.

    Dynamo replays calls such as ``random.random()`` in each call of the compiled code. It executes others, such as
    ``random.sample``, only while it traces, and compiles code that sets the generator to the state after the trace.

    Workaround (until torch replays these calls or breaks the graph): torch 2.15 does so for the functions of `random`,
    and torch 2.11 for methods of a `random.Random` object.
    """
    from torch._dynamo.convert_frame import register_bytecode_hook

    functions: list[str] = []

    def look(code: types.CodeType, new_code: types.CodeType) -> None:
        if "setstate" in new_code.co_names and "setstate" not in code.co_names:
            functions.append(code.co_name)

    handle = register_bytecode_hook(look)
    try:
        yield functions
    finally:
        handle.remove()


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, including errors that Dynamo and Inductor have wrapped."""
    seen: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        current = open_.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        open_ += [current.__cause__, current.__context__, getattr(current, "inner_exception", None)]


@optional("dynamo settings", lambda: False)
def is_disabled() -> bool:
    """Return whether ``TORCH_COMPILE_DISABLE=1`` disables ``torch.compile``."""
    return torch._dynamo.config.disable


@optional("compiled modules", lambda: False)
def is_dynamo_wrapper(module: object) -> bool:
    """Return whether ``torch.compile(module)`` returned this object."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_compiled_or_disabled(function: object) -> bool:
    """Return whether ``torch.compile`` or ``torch.compiler.disable`` returned a function, or a wrapper has its dict."""
    return hasattr(function, "_torchdynamo_orig_callable")


def unwrap_dynamo(module: torch.nn.Module) -> torch.nn.Module:
    """Return the original module of an object that ``torch.compile(module)`` returned."""
    while is_dynamo_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def has_call_slot() -> bool:
    """Return whether the call of a module looks for compiled code in ``_compiled_call_impl``."""
    return hasattr(torch.nn.Module, "_compiled_call_impl")


def compiled_in_place(wrapper: torch.nn.Module) -> torch.nn.Module:
    """Return the original module of an object that ``torch.compile(module)`` returned, compiled in place.

    ``module.compile()`` would need the arguments of ``torch.compile``, but the wrapper does not store them. It stores
    the context that ``torch.compile`` made from them.
    """
    module = unwrap_dynamo(wrapper)
    module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)  # type: ignore[operator]
    return module


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # torch 2.15 added the second


@optional("dynamic inputs", lambda: lambda: None)
def mark_dimensions(tensor: torch.Tensor, dimensions: Sequence[int]) -> Callable[[], None]:
    """Mark dimensions as dynamic for the next compile. Return a function that removes the marks.

    If a mark remained, torch would recompile for the same tensor. Torch specializes a dimension if the code needs it.
    """
    marked = [each for each in (tensor, *_inner_tensors(tensor)) if not any(hasattr(each, name) for name in _MARKS)]
    torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))

    def unmark() -> None:
        for each in marked:
            for name in _MARKS:
                vars(each).pop(name, None)

    return unmark


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors within a traceable wrapper subclass, because torch marks them, too."""
    if not is_wrapper_subclass(tensor):
        return []
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # type: ignore[attr-defined]
    return [tensor for value in inner for tensor in (value, *_inner_tensors(value))]
