"""Wraps Dynamo: ``torch.compile``, its settings and caches, wrappers of modules, and dynamic shapes."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch  # as in Dynamo itself

import torch
from torch._C import _functorch
from torch._dynamo import exc as _exc
from torch._dynamo import maybe_mark_dynamic
from torch.autograd import forward_ad
from torch.distributions import Distribution

CONTROL_FLOW = (_exc.RestartAnalysis, _exc.SkipFrame, *_exc.exceptions_allowed_to_be_fallback)
"""Exceptions of Dynamo that pass through a backend without being failures. The last of them request a graph break."""

SHARES_RECOMPILE_LIMIT = "isolate_recompiles" not in inspect.signature(torch.compile).parameters
"""Whether two configs of one code object share a ``recompile_limit``. Workaround (torch<2.13): newer versions have
separate limits."""


def function_with_own_cache(function: types.FunctionType, name: str) -> types.FunctionType:
    """Copy a function with its code object, because Dynamo stores compiled graphs and counts recompiles by code object.

    Workaround (torch<2.13): in later versions, ``torch.compile(isolate_recompiles=True)`` does the same.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def validate_arguments(validates: bool) -> bool:
    """Switch the argument validation of ``torch.distributions``, which breaks graphs, and return whether it was on.

    The first ``torch.compile`` of a process also switches it off. ``cache_clear`` lets the user's next one do so.
    """
    from torch._dynamo.eval_frame import TorchPatcher

    before = Distribution._validate_args
    Distribution.set_default_validate_args(validates)
    TorchPatcher.patch.cache_clear()
    return before


@contextlib.contextmanager
def trace_settings(asked: Mapping[str, Any], *, limit_factor: int, guards_hooks: bool, frozen: bool) -> Iterator[None]:
    """Within the ``with`` block, Dynamo traces with the ``asked`` settings, and with these.

    torch holds its compile lock, so threads wait.

    - ``recompile_limit`` is multiplied by ``limit_factor``.
    - Hooks of modules get guards if ``guards_hooks``. By default, Dynamo does not notice the first hook of a module.
    - Dynamo deletes its weak references to weights when the compile ends. By default, it does so for its own backends
      only, and ``module.cpu()`` then fails for tensor subclasses.
    - If the weights are ``frozen``, Inductor's ``freezing`` is set globally, because Dynamo ignores
      ``options={"freezing": True}``. This is safe, because `WeightWatch` checks frozen weights.
    - A warning is ignored: Dynamo reads ``.grad`` of each input, and torch warns if the input is the output of another
      target. The user's code does not cause this warning.

    Workaround (torch<2.12): this function also disables two settings. With
    ``skip_tensor_guards_with_matching_dict_tags``, torch skips the guards on the weights of a module if the dictionary
    of the weights is unchanged. torch then does not notice a new ``requires_grad``, a new dtype set through ``.data``,
    and a buffer that is an input and changes in the call. With ``use_recursive_dict_tags_for_guards``, torch does not
    notice the first parameter of a module. docs/reference/limits.md has the cost of all guards.
    """
    from torch._dynamo import config
    from torch._inductor import config as inductor_config

    settings = {"recompile_limit": limit_factor * config.recompile_limit, "invalidate_compile_context_weakrefs": True}
    settings |= asked
    if guards_hooks:
        settings["skip_nnmodule_hook_guards"] = False
    if torch.__version__.startswith("2.11.") and not frozen:
        shortcuts = "skip_tensor_guards_with_matching_dict_tags", "use_recursive_dict_tags_for_guards"
        settings |= dict.fromkeys(shortcuts, False)
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        stack.enter_context(without_odd_gradients())
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        if frozen:
            stack.enter_context(inductor_config.patch(freezing=True))
        yield


def recompile_limit() -> int:
    """Return the maximum number of graphs that torch compiles for the code of one function."""
    from torch._dynamo import config

    return int(config.recompile_limit)


# Each call of a target compares the next three values. As methods of C objects, they need no Python frame.

hooks_registered: Callable[[], int] = functools.partial(
    operator.attrgetter("next_id"), torch.utils.hooks.RemovableHandle
)
"""Returns a number that increases with each hook on any module or tensor of the process."""

transforms: Callable[[], Any] = _functorch.peek_interpreter_stack
"""Returns the innermost transform of `torch.func`, or ``None``.

Workaround (until torch has a public function for transforms).
"""

forward_ad_level: Callable[[], int] = functools.partial(operator.attrgetter("_current_level"), forward_ad)
"""Returns the level of forward-mode AD, which is -1 outside of it.

Workaround (until torch has a public function for the level).
"""


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode AD is active. Dynamo does not compile within them."""
    return transforms() is not None or forward_ad_level() >= 0


is_jit_tracing: Callable[[], bool] = torch._C._is_tracing
"""Returns whether ``torch.jit.trace`` is running, as ``torch.jit.is_tracing`` does, but 0.2 µs faster."""


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
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    safe_grad = meta_utils.safe_grad

    def plain_grad(tensor: Any) -> Any:
        grad = safe_grad(tensor)
        odd = grad is not None and (grad.shape != tensor.shape or is_traceable_wrapper_subclass(grad))
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


def ends_at_gradient(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo ends because the code calls `torch.autograd.grad`.

    Workaround (torch<2.13): older versions compile the code before such a call as a graph, whose gradient cannot be
    differentiated. Later versions compile none of it, or trace the call.
    """
    reason = getattr(getattr(graph_module, "compile_subgraph_reason", None), "reason", "")
    return "`torch.autograd.grad`" in reason


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


def is_disabled() -> bool:
    """Return whether ``TORCH_COMPILE_DISABLE=1`` disables ``torch.compile``."""
    return torch._dynamo.config.disable


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


def compiled_in_place(wrapper: torch.nn.Module) -> torch.nn.Module:
    """Return the original module of an object that ``torch.compile(module)`` returned, compiled in place.

    ``module.compile()`` would need the arguments of ``torch.compile``, but the wrapper does not store them. It stores
    the context that ``torch.compile`` made from them.
    """
    module = unwrap_dynamo(wrapper)
    module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)  # type: ignore[operator]
    return module


_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")  # torch 2.15 added the second


def mark_dimensions(tensor: torch.Tensor, dimensions: Sequence[int]) -> Callable[[], None]:
    """Mark dimensions as dynamic for the next compile. Return a function that removes the marks.

    If a mark remained, torch would recompile for the same tensor. Torch specializes a dimension if the code needs it.
    """
    marked = [each for each in (tensor, *_inner_tensors(tensor)) if not any(hasattr(each, name) for name in _MARKS)]
    maybe_mark_dynamic(tensor, list(dimensions))

    def unmark() -> None:
        for each in marked:
            for name in _MARKS:
                vars(each).pop(name, None)

    return unmark


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors within a traceable wrapper subclass, because torch marks them, too."""
    if not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
        return []
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor for value in inner for tensor in (value, *_inner_tensors(value))]


def numbers_as_dynamic(inputs: Iterable[str]) -> Any:
    """Return a context manager with which compiles treat these integer inputs as dynamic."""
    parts = (name.partition("[") for name in inputs)
    sources = [f"L['{local}'][{index}" for local, _, index in parts]
    of_user = torch.compiler.config.dynamic_sources
    return torch.compiler.config.patch(  # type: ignore[attr-defined]  # torch adds it when the module is imported
        dynamic_sources=",".join([of_user, *sources] if of_user else sources)
    )
