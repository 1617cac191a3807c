"""`CalledTargets`: records the modules and methods that a step calls, which are the default targets of a `Session`."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks.targets.fsdp import innermost_fsdp_units
from compile_callbacks.targets.target import Target, call_targets, only_if_named

_MODULE_CALL = nn.Module._wrapped_call_impl.__code__
_BACKWARD = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}  # activation checkpoints recompute here
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@dataclass
class _Call:
    """A call of a module, or of one of its methods."""

    frame: FrameType
    module: nn.Module
    method: str | None = None  # None for the call of the module
    inner: list[_Call] = field(default_factory=list)  # the calls of modules within this call so far


class CalledTargets:
    """Records the outermost modules and methods that a step calls.

    Python's profile function (`sys.setprofile`) receives each call between `start` and `stop`, so the step is slow. The
    class does not record methods of the root module and modules without parameters, but it records the calls within
    them. It does not record calls within metrics, because metrics only accumulate state. It also does not record calls
    within functions that the user compiled and within backward passes.

    The class records a method if the method calls a module or returns a tensor. If a method calls its own module, as
    ``generate`` does, the class records the module instead.
    """

    def __init__(self, root: nn.Module) -> None:
        self.stages: set[str] = set()  # the stages whose first step has begun
        self._root = root
        self._recording = False
        self._clear()

    def is_first(self, stage: str) -> bool:
        """Return whether this is the first step of a stage."""
        first = stage not in self.stages
        self.stages.add(stage)
        return first

    def _clear(self) -> None:
        self._names: dict[int, str] = {}
        self._modules: dict[int, nn.Module] = {}  # modules that may become targets
        self._found: dict[tuple[int, str | None], Target] = {}
        self._skipped: FrameType | None = None  # the frame within which no call is recorded
        self._method: _Call | None = None  # the outermost method that is running

    def start(self) -> None:
        """Start recording, unless the user's profiler is running, because Python has only one profile function."""
        if sys.getprofile() is not None or _torch.dynamo.is_profiling():
            return
        modules = [(name, module) for name, module in self._root.named_modules() if name]
        self._names = {id(module): name for name, module in modules}
        self._modules = {id(module): module for _, module in modules if next(module.parameters(), None) is not None}
        self._recording = True
        sys.setprofile(self._event)

    def stop(self) -> list[Target]:
        """Stop recording, and return the targets since `start` in the order of their first call."""
        if self._recording:
            sys.setprofile(None)
            self._recording = False
        found = list(self._found.values())
        self._clear()
        return found

    # ------------------------------------------------------------------------------------------ one event

    def _event(self, frame: FrameType, event: str, result: Any) -> None:
        if self._skipped is not None:
            if event == "return" and frame is self._skipped:
                self._skipped = None
        elif event == "call":
            self._call_begins(frame)
        elif event == "return" and self._method is not None and frame is self._method.frame:
            self._method_ends(self._method, result)

    def _call_begins(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in _BACKWARD or _torch.dynamo.is_compiled_call(code):
            self._skipped = frame
            return
        if code is not _MODULE_CALL and not (code.co_argcount and code.co_varnames[0] == "self"):
            return
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            return
        calls_root = module is self._root and code is _MODULE_CALL
        runs_step = "forward" in vars(self._root)  # for DDP, Lightning replaces ``forward`` by the step
        if only_if_named(module) or (calls_root and not runs_step):
            self._skipped = frame
        elif id(module) not in self._modules:
            return
        elif code is _MODULE_CALL:
            self._module_called(_Call(frame, module))
            self._skipped = frame
        elif self._method is None and (method := _method_name(module, code)) is not None:
            self._method = _Call(frame, module, method)

    def _module_called(self, call: _Call) -> None:
        if self._method is None:
            self._add(call)
            return
        self._method.inner.append(call)
        if call.module is self._method.module:
            for inner in self._method.inner:
                self._add(inner)
            self._method = None

    def _method_ends(self, call: _Call, result: Any) -> None:
        self._method = None
        if call.inner or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self._add(call)

    def _add(self, call: _Call) -> None:
        path = self._names[id(call.module)]
        if call.method is None or (call.method == "forward" and innermost_fsdp_units(call.module)):
            targets = call_targets(path, call.module)
        else:
            targets = [Target(f"{path}.{call.method}", call.module, call.method)]
        for target in targets:
            self._found.setdefault((id(target.module), target.method), target)


def _method_name(module: nn.Module, code: CodeType) -> str | None:
    """Return the name of the module's method with this code, or ``None`` for methods of ``nn.Module``."""
    name = code.co_name
    if name.startswith("__") or code.co_flags & _SUSPENDED or (name != "forward" and hasattr(nn.Module, name)):
        return None
    function = inspect.getattr_static(module, name, None)
    function = getattr(function, "__func__", function)
    target = getattr(function, "target", None)  # set if the method is already a target
    function = target.function if isinstance(target, Target) else function
    if not inspect.isroutine(function) or not hasattr(function, "__code__"):
        return None  # for example a functools.lru_cache, which does not call the function each time
    return name if getattr(inspect.unwrap(function), "__code__", None) is code else None
