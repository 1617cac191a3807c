"""Dynamo: ``torch.compile`` itself, its settings and caches, and what it knows of modules."""

from __future__ import annotations

import contextlib
import inspect
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._C import _functorch
from torch._dynamo import exc as _exc
from torch.autograd import forward_ad


def raised_while_compiling(error: BaseException) -> bool:
    """Whether an error came out of Dynamo compiling a frame, and not out of running one.

    By its type or, as torch 2.11 lets an ``AssertionError`` of Dynamo's own through, by where it was raised; from
    its own types Dynamo removes the frames that would tell.
    """
    if isinstance(error, (_exc.TorchDynamoException, _exc.FailOnRecompileLimitHit)):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame, _ in frames)


# Dynamo's control flow, which passes through a backend. The last ones ask Dynamo for a graph break.
CONTROL_FLOW = (_exc.RestartAnalysis, _exc.SkipFrame, *_exc.exceptions_allowed_to_be_fallback)

SHARES_RECOMPILE_LIMIT = "isolate_recompiles" not in inspect.signature(torch.compile).parameters
"""Whether two settings of one code object use up one ``recompile_limit`` (torch before 2.13)."""


def function_with_own_cache(function: types.FunctionType, name: str) -> types.FunctionType:
    """A copy of ``function`` with a code object, and so a Dynamo cache and recompile limit, of its own.

    Dynamo keeps compiled graphs per code object; two settings of one function would share its
    ``recompile_limit``. ``torch.compile(isolate_recompiles=True)`` ends that, but is not in torch 2.11.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def compile_function(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    fullgraph: bool,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """``torch.compile``, isolated from other compiles of the same code where torch can (2.13 and later)."""
    isolate: dict[str, Any] = {"isolate_recompiles": True} if not SHARES_RECOMPILE_LIMIT else {}
    compiled: Callable[..., Any] = torch.compile(
        function, backend=backend, fullgraph=fullgraph, dynamic=dynamic, **isolate
    )
    return compiled


def with_dynamo_settings(compiled: Callable[..., Any], **settings: Callable[[Any], Any]) -> Callable[..., Any]:
    """``compiled``, called with Dynamo settings that are functions of what they are else; costs 10 µs a call."""
    from torch._dynamo import config

    def call(*args: Any, **kwargs: Any) -> Any:
        with _settings_lock:
            _settings_active.append(settings)
            for name, change in settings.items():
                _settings_before.setdefault(name, getattr(config, name))
                setattr(config, name, change(_settings_before[name]))
        try:
            return compiled(*args, **kwargs)
        finally:
            with _settings_lock:
                _settings_active.remove(settings)
                while not _settings_active and _settings_before:
                    setattr(config, *_settings_before.popitem())

    return call


# Calls of several threads overlap. `config.patch` would restore the value that another thread had set.
_settings_lock = threading.Lock()

_settings_active: list[Mapping[str, Any]] = []

_settings_before: dict[str, Any] = {}


def recompile_limit() -> int:
    """How many graphs torch compiles of the code of one function."""
    from torch._dynamo import config

    return int(config.recompile_limit)


def hooks_registered() -> int:
    """A number that grows with every hook that is registered on any module or tensor of the process."""
    return torch.utils.hooks.RemovableHandle.next_id


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or forward-mode AD is at work around a call, which Dynamo then leaves alone.

    Asked before each call; 0.1 us. There is no public question for either (2.11 to 2.15).
    """
    return _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def has_call_hooks(module: torch.nn.Module, *, own: bool = True) -> bool:
    """Whether forward or backward hooks are registered on a module or within it.

    Args:
        module: The module.
        own: Whether those on the module itself count.
    """
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
        if own or part is not module
    )


def without_weak_references() -> Any:
    """A context in which Dynamo drops its weak references to weights when a compile ends.

    By default it does so for its own backends alone, and ``module.cpu()`` then fails for weights that are tensor
    subclasses.
    """
    return torch._dynamo.config.patch(invalidate_compile_context_weakrefs=True)


@contextlib.contextmanager
def without_odd_gradients() -> Iterator[None]:
    """A context in which Dynamo overlooks gradients that it fails on, so that it can compile after a backward pass.

    While FSDP1 has gathered a weight, the weight's gradient of the step before is still sharded: "attempting to assign
    a gradient of size ..." (2.11 to 2.15; to be deleted with the support for FSDP1). For gradients of tensor subclasses
    2.11 fails with "Expected SubclassSymbolicContext" (to be deleted with the support for 2.11). There is no public way
    to hide a gradient.
    """
    from torch._subclasses import meta_utils
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    safe_grad = meta_utils.safe_grad

    def plain_grad(tensor: Any) -> Any:
        grad = safe_grad(tensor)
        odd = grad is not None and (grad.shape != tensor.shape or is_traceable_wrapper_subclass(grad))
        return None if odd else grad

    meta_utils.safe_grad = plain_grad  # type: ignore[assignment]
    try:
        yield
    finally:
        meta_utils.safe_grad = safe_grad


def causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those that are behind it, those too that Dynamo and Inductor wrapped and hid."""
    seen: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        found = open_.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        open_ += [found.__cause__, found.__context__, getattr(found, "inner_exception", None)]


def forget_compiled(backend: Callable[..., Any]) -> None:
    """Take what was compiled with a backend out of Dynamo's caches; nobody else's code is touched.

    Compiled code stays alive for three reasons, and ``torch._dynamo.reset()`` would drop all code of the process:

    - Dynamo's cache hangs on code objects, which the garbage collector does not look into: what refers back to its own
      function from there is never collected. Behind a graph break it is the user's code objects, which may hold
      graphs of another ``torch.compile`` too.
    - Torch keeps every backend, for ``reset()`` to call.
    - The code that Dynamo writes around a graph break is never freed (Python 3.11; ``reset()`` does not help), and so
      the graphs that it calls stay among the globals of the user's file.

    Args:
        backend: What `compile_function` was given.
    """
    from torch._C._dynamo.eval_frame import (
        _debug_get_cache_entry_list,
        _debug_get_precompile_entries,
        reset_code,
    )
    from torch._dynamo import convert_frame, eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import CleanupManager

    def is_ours(other: Any) -> bool:
        return bool(getattr(other, "compiler_fn", other) == backend)  # torch wraps what torch.compile was given

    with convert_frame.compile_lock:
        for code in [code for reference in convert_frame.input_codes.seen if (code := reference()) is not None]:
            entries = _debug_get_cache_entry_list(code)
            ours = [entry for entry in entries if is_ours(entry.backend)]
            written = [entry.code for entry in ours]
            if ours and len(ours) == len(entries) and not _debug_get_precompile_entries(code):
                del entries, ours  # they point into what goes
                reset_code(code)
            else:  # as torch does where an object dies that a guard has seen
                for entry in ours:
                    if (state := entry.guard_manager.extra_state) is not None:
                        state.invalidate(entry, DeletedGuardManagerWrapper("compiled code was given back"))
            for compiled_code in written:
                if compiled_code in CleanupManager.instance:
                    CleanupManager.instance._remove_id(id(compiled_code))
        for key, kept in list(eval_frame.cached_backends.items()):
            if is_ours(kept):
                del eval_frame.cached_backends[key]


def is_dynamo_wrapper(module: object) -> bool:
    """Whether this is what ``torch.compile(module)`` returns."""
    return isinstance(module, torch._dynamo.OptimizedModule)


def is_compiled_call(code: types.CodeType) -> bool:
    """Whether this is the code that runs when a function is called that ``torch.compile`` returned."""
    return code.co_name == "compile_wrapper" and code.co_filename == torch._dynamo.eval_frame.__file__


def is_profiling() -> bool:
    """Whether torch's profiler is running, which may have a profile function of Python of its own."""
    return bool(torch._C._autograd._profiler_enabled())


def unwrap_dynamo(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside what ``torch.compile(module)`` returned."""
    while is_dynamo_wrapper(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


def compiled_in_place(wrapper: torch.nn.Module) -> torch.nn.Module:
    """Take the module out of what ``torch.compile(module)`` returned, and compile it in place with the same settings.

    ``module.compile()`` would need the settings as arguments, and the wrapper keeps only the context made of them.
    """
    module = unwrap_dynamo(wrapper)
    module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)  # type: ignore[operator]
    return module
