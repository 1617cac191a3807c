"""Wraps Dynamo: ``torch.compile``, its settings, the conversion of frames, wrappers of modules, and dynamic shapes."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch  # as in Dynamo itself

import torch
from torch.autograd import forward_ad
from torch.distributions import Distribution

from compile_callbacks._torch import ports, torch_2_11
from compile_callbacks._torch.graphs import is_wrapper_subclass
from compile_callbacks._torch.ports import optional


def control_flow() -> tuple[type[Exception], ...]:
    """Return exceptions of Dynamo that pass through a backend without being failures. Most request a graph break."""
    exc = torch._dynamo.exc
    return exc.RestartAnalysis, exc.SkipFrame, *exc.exceptions_allowed_to_be_fallback


_found_validation = list[bool]()  # by each session that has not ended: only the first finds True; they end in any order


@optional("dynamo settings", lambda: None)
def validate_arguments(*, restores: bool) -> None:
    """Switch the argument validation of ``torch.distributions`` off, which breaks graphs, or restore it at the end."""
    if not restores:
        _found_validation.append(Distribution._validate_args)
    Distribution.set_default_validate_args(restores and _found_validation.pop())
    torch._dynamo.eval_frame.TorchPatcher.patch.cache_clear()  # lets the user's next torch.compile switch it off


@contextlib.contextmanager
def trace_settings(
    asked: Mapping[str, Any], *, limit_factor: int, guards_hooks: bool, frozen: bool
) -> Iterator[Sequence[str]]:
    """Within the ``with`` block, Dynamo traces with the ``asked`` settings, and with these.

    torch holds its compile lock, so threads wait. Yields the list of `frames_with_constant_draws`. If the weights are
    ``frozen``, Inductor's ``freezing`` is set globally, because Dynamo ignores ``options={"freezing": True}``. This is
    safe, because `WeightWatch` checks frozen weights.
    """
    from torch._dynamo import config
    from torch._inductor import config as inductor_config

    # Without the second setting, Dynamo keeps weak references to weights, and ``module.cpu()`` fails for subclasses.
    settings = {"recompile_limit": limit_factor * config.recompile_limit, "invalidate_compile_context_weakrefs": True}
    settings |= {**asked, **torch_2_11.trace_settings(frozen=frozen)}
    if guards_hooks:  # by default, Dynamo does not notice the first hook of a module
        settings["skip_nnmodule_hook_guards"] = False
    for name in [name for name in settings if not hasattr(config, name)]:
        ports.note("dynamo settings", AttributeError(f"there is no torch._dynamo.config.{name}"))
        del settings[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(settings))
        if torch_2_11.IS_2_11 or (torch.distributed.is_available() and torch.distributed.is_initialized()):
            stack.enter_context(ports.optional_block("odd gradients", without_odd_gradients))
        # Dynamo reads ``.grad`` of each input, also of the output of another target.
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


@optional("modes", lambda: (int, lambda: -1))
def transform_checks() -> tuple[Callable[[], int], Callable[[], int]]:
    """Return functions for the number of active transforms of `torch.func`, and the level of forward AD (or -1).

    Workaround (until torch has public functions for both; no issue). torch also calls the first one in each call.
    """
    level = functools.partial(operator.attrgetter("_current_level"), forward_ad)
    level()
    return torch._C._functorch.get_dynamic_layer_stack_depth, level


def is_transformed() -> bool:
    """Return whether a transform of `torch.func` or forward-mode AD is active. Dynamo does not compile within them."""
    transforms, level = transform_checks()
    return bool(transforms() or level() >= 0)


def has_call_hooks(module: torch.nn.Module, *, own: bool = True) -> bool:
    """Return whether a module or its submodules have forward or backward hooks."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in module.modules()
        if own or m is not module
    )


def without_odd_gradients() -> contextlib.AbstractContextManager[Any]:
    """Within the ``with`` block, Dynamo ignores gradients on which it would fail.

    Workaround (until FSDP1 is no longer supported; pytorch#111317): while FSDP1 has gathered a weight, the gradient of
    the last step is still sharded, and Dynamo fails with "attempting to assign a gradient of size ..." (2.11 to 2.15).

    Workaround (torch<2.12; no issue): Dynamo fails on gradients of subclasses: "Expected SubclassSymbolicContext".
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

    Dynamo replays ``random.random()``. It executes ``random.sample`` (2.15) or methods of a `random.Random` (2.11) only
    while it traces, and compiles code that sets the generator to the state after the trace.

    Workaround (until torch replays these calls or breaks the graph; pytorch#197085).
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


@optional("dynamo settings", lambda: False)
def is_disabled() -> bool:
    """Return whether ``TORCH_COMPILE_DISABLE=1`` disables ``torch.compile``."""
    return torch._dynamo.config.disable


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether FSDP gathers the weights of a module for each call and frees them afterwards.

    FSDP1 and FSDP2 set an attribute on each module for Dynamo (torch 2.11 to 2.15). The weights do not tell, because
    they are ordinary tensors during a call.
    """
    return any(getattr(submodule, "_is_fsdp_managed_module", False) for submodule in module.modules())


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

    The wrapper does not store the arguments for ``module.compile()``, but the context that torch made from them.
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
    if any(hasattr(tensor, name) for name in _MARKS) or is_wrapper_subclass(tensor):  # torch marks inner tensors, too
        return lambda: None
    torch._dynamo.maybe_mark_dynamic(tensor, list(dimensions))

    def unmark() -> None:
        for name in _MARKS:
            vars(tensor).pop(name, None)

    return unmark


# ------------------------------------------------------------------------------------------ frames


class Frame(NamedTuple):
    """A frame that Dynamo converts: the function of `compile_function`, or later a frame behind a graph break."""

    code: types.CodeType
    convert: Callable[[], Any]
    """Traces and compiles the frame, before any of its code runs, and returns the result for torch."""
    is_graph_break: Callable[[Exception], bool]
    """Returns whether torch runs the frame eagerly after this error, and compiles the frames beneath."""


def run_frame_eagerly() -> Any:
    """Return the result with which torch runs a frame and all frames beneath it eagerly, this time."""
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
    from torch._dynamo.types import ConvertFrameReturn

    eager = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # the frame, and the frames beneath it
    return ConvertFrameReturn(frame_exec_strategy=eager, apply_to_code=False)


def skip_frame() -> Any:
    """Return the result with which torch runs a frame eagerly from now on, and converts the frames beneath it."""
    return torch._dynamo.types.ConvertFrameReturn()


def skipped(result: Any) -> str | None:
    """Return the reason why torch compiles nothing of a frame, or ``None`` if it compiled the frame."""
    if result.guarded_code is not None or result.frame_exec_strategy.cur_action.name != "SKIP":
        return None
    reason = getattr(result, "skip_reason", None) or "torch skips its code"  # before torch 2.13, torch only logs it
    return "torch finds no tensor operation in its code" if "No ops traced" in reason else reason


def compile_function(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    around: Callable[[Frame], Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """Call ``torch.compile``, isolated from other compiles of the same code (torch 2.13 and later).

    ``around`` is called for each frame that torch is about to convert, and returns the result of the conversion. The
    setting ``suppress_errors`` has no effect on these frames: torch would run a frame on which ``around`` failed.

    Workaround (until ``torch.compile`` takes a function that handles the failures of a frame; no issue).

    Raises:
        ports.MissingPortError: If torch has changed the conversion of frames.
    """
    isolate: dict[str, Any] = {} if torch_2_11.IS_OLDER_THAN_2_13 else {"isolate_recompiles": True}
    wrap = _Conversion if fullgraph else _ConvertFrame
    with ports.essential("frames"):
        # A later frame needs these parts, too late to compile the target in another way.
        _ = run_frame_eagerly(), skip_frame(), torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError
        context: Any = torch._dynamo.optimize(backend, nopython=fullgraph, dynamic=dynamic, **isolate)
        context.callback._torchdynamo_orig_backend = wrap(context.callback._torchdynamo_orig_backend, around)
        compiled: Callable[..., Any] = context(function)
    return compiled


class _Conversion:
    """Calls ``around`` for each frame, in the place of Dynamo's ``ConvertFrameAssert``."""

    def __init__(self, convert: Any, around: Callable[[Frame], Any], *, fullgraph: bool = True) -> None:
        self._convert, self._around, self._fullgraph = convert, around, fullgraph
        self._box = getattr(convert, "_box", None)  # torch reads these attributes
        self._torchdynamo_orig_backend = convert._torchdynamo_orig_backend

    def _clone_with_backend(self, backend: Any) -> _Conversion:
        """Return the same object, because a clone would split the graphs within DDP's forward."""
        return self

    def __call__(self, frame: Any, *arguments: Any, skip: int = 0) -> Any:
        def convert() -> Any:
            # The user's frame is further up by this function and its three callers, and torch shows it in its logs.
            return self._convert(frame, *arguments, skip=skip + 4)

        def is_graph_break(error: Exception) -> bool:
            breaks = isinstance(error, (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError))
            return breaks and not (self._fullgraph or getattr(self._box, "error_on_graph_break", None))

        return self._around(Frame(frame.f_code, convert, is_graph_break))


class _ConvertFrame(_Conversion):
    """Dynamo's ``ConvertFrame``, with a `_Conversion` in it."""

    def __init__(self, convert: Any, around: Callable[[Frame], Any]) -> None:
        convert._inner_convert = _Conversion(convert._inner_convert, around, fullgraph=False)
        super().__init__(convert, around, fullgraph=False)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with torch._dynamo.config.patch(suppress_errors=False):
            return self._convert(*arguments, **keywords)
