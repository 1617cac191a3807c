"""The modules and methods of a module that its steps call: the default targets."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks.runtime.fsdp import innermost_fsdp_units
from compile_callbacks.runtime.target import Target, call_targets, contains, only_if_named, overlap

_MODULE_CALL = nn.Module._wrapped_call_impl.__code__
_NO_FORWARD_PASS = {torch.autograd.backward.__code__, torch.autograd.grad.__code__}  # recomputed forwards run in them
_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class CalledTargets:
    """Records the modules and methods of a root module that a step calls, outermost first.

    A profile function of Python (`sys.setprofile`) sees every call between `start` and `stop`, so the step is slow. It
    looks through the root's own methods and through modules without parameters. It does not look into metrics, which
    are state and not computation, into functions that the user compiled, and into backward passes.

    A method is recorded if it calls a module or returns a tensor. A method that calls its own module, as ``generate``
    does, is looked through.

    Args:
        root: The module.
        others: Targets of other callbacks. They are not recorded, and modules that contain one are looked through.
    """

    def __init__(self, root: nn.Module, others: Sequence[Target] = ()) -> None:
        self._root = root
        self._others = others
        self._names: dict[int, str] = {}  # of the modules with parameters
        self._modules: dict[int, nn.Module] = {}
        self._found: dict[tuple[int, str | None], Target] = {}
        self._inside: FrameType | None = None  # the frame whose calls are ignored
        self._method: _Method | None = None
        self._recording = False

    def start(self) -> None:
        """Begin to record; not if the user's own profiler is running, because Python has one profile function."""
        if sys.getprofile() is not None or _torch.dynamo.is_profiling():
            return
        modules = [(name, module) for name, module in self._root.named_modules() if name]
        self._modules = {
            id(module): module
            for _, module in modules
            if next(module.parameters(), None) is not None and not self._contains_others(module)
        }
        self._names = {id(module): name for name, module in reversed(modules)}
        self._recording = True
        sys.setprofile(self._event)

    def stop(self) -> list[Target]:
        """Stop, and return what was recorded since `start`, in the order of the first call."""
        if not self._recording:
            return []
        sys.setprofile(None)
        found = [one for one in self._found.values() if not any(overlap(one, other) for other in self._others)]
        self._found, self._modules, self._names = {}, {}, {}
        self._inside = self._method = None
        self._recording = False
        return found

    # ------------------------------------------------------------------------------------------ one event

    def _event(self, frame: FrameType, event: str, result: Any) -> None:
        if self._inside is not None:
            if event == "return" and frame is self._inside:
                self._inside = None
        elif event == "call":
            self._call_begins(frame)
        elif event == "return" and self._method is not None and frame is self._method.frame:
            self._method_ends(self._method, result)

    def _call_begins(self, frame: FrameType) -> None:
        code = frame.f_code
        if code in _NO_FORWARD_PASS or _torch.dynamo.is_compiled_call(code):
            self._inside = frame
        elif code is _MODULE_CALL or (code.co_argcount and code.co_varnames[0] == "self"):
            module = frame.f_locals.get("self")
            if not isinstance(module, nn.Module):
                return
            if only_if_named(module) or (
                module is self._root and code is _MODULE_CALL and not (_steps(module) or self._others)
            ):
                self._inside = frame
            elif id(module) not in self._modules:
                return
            elif code is _MODULE_CALL:
                self._module_called(module)
                self._inside = frame
            elif self._method is None and (method := _method_of(module, code)) is not None:
                self._method = _Method(frame, module, method)

    def _contains_others(self, module: nn.Module) -> bool:
        return any(other.module is not module and contains(module, other.module) for other in self._others)

    def _module_called(self, module: nn.Module) -> None:
        method = self._method
        if method is not None:
            method.called.append(module)
            if module is not method.module:
                return
            self._method = None  # look through the method: its module's call is the target
        for called in method.called if method is not None else [module]:
            self._add(called, None)

    def _method_ends(self, method: _Method, result: Any) -> None:
        self._method = None
        if method.called or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self._add(method.module, method.name)

    def _add(self, module: nn.Module, method: str | None) -> None:
        path = self._names[id(module)]
        if method is None or (method == "forward" and innermost_fsdp_units(module)):
            targets = call_targets(path, module)
        else:
            targets = [Target(f"{path}.{method}", module, method)]
        for target in targets:
            self._found.setdefault((id(target.module), target.method), target)


class _Method:
    """A method that is running, and the modules that it has called so far."""

    def __init__(self, frame: FrameType, module: nn.Module, name: str) -> None:
        self.frame = frame
        self.module = module
        self.name = name
        self.called: list[nn.Module] = []


def _steps(root: nn.Module) -> bool:
    """Whether a call of the LightningModule is a step: for DDP, Lightning puts the step in the place of ``forward``."""
    return "forward" in vars(root)


def _method_of(module: nn.Module, code: CodeType) -> str | None:
    """The name by which a module has a function as a method of its own, not as one that every module has."""
    name = code.co_name
    if name.startswith("__") or code.co_flags & _SUSPENDED or (name != "forward" and hasattr(nn.Module, name)):
        return None
    function = inspect.getattr_static(module, name, None)
    function = getattr(function, "__func__", function)
    target = getattr(function, "target", None)  # the method is a target already
    function = target.function if isinstance(target, Target) else function
    return name if getattr(inspect.unwrap(function), "__code__", None) is code else None
