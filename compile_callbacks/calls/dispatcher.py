"""`Dispatcher`: replaces the call of a target. `CallProbe`: reports the call of what may become a target."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compile_callbacks.targets.target import Callee

_CALL_SLOT = "_compiled_call_impl"  # nn.Module.compile() sets it, and nn.Module.__call__ calls it
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_ABSENT = object()
_is_compiling, _is_tracing = torch.compiler.is_compiling, torch.jit.is_tracing  # type: ignore[attr-defined]


class CallSlot:
    """An object in the call slot of a module, ``module._compiled_call_impl``, or in place of one of its methods.

    It is an object and not a closure, so that copies and pickles of the module can drop it. A copied closure would run
    with the weights of the original module.
    """

    def __init__(self, callee: Callee) -> None:
        self.callee = callee
        self.eager = callee.eager
        # Lightning inspects the arguments through __wrapped__. Users read __name__ and __self__ of their methods.
        functools.update_wrapper(self, self.eager, ("__self__", "__func__", *functools.WRAPPER_ASSIGNMENTS), ())
        self.selected: Callable[..., Any] = self.eager  # the function that a call of the callee runs now
        self._attributes = vars(callee.module)
        self._slot = callee.method or _CALL_SLOT
        self._replaced: Any = _ABSENT  # the former value of the slot

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the selected function."""
        # While torch traces another target, an export or a logger's graph, this target is a part of that graph.
        if _is_compiling() or _is_tracing():  # type: ignore[no-untyped-call]
            return self.eager(*args, **kwargs)
        # For a wrapper such as DDP, Lightning replaces `forward` by a function that calls the step. Its graph would
        # contain the whole step. The methods of Lightning's demo modules are no functions.
        forward = self._attributes.get("forward")
        if isinstance(forward, types.FunctionType) and forward.__module__.partition(".")[0] in _LIGHTNING:
            return self.eager(*args, **kwargs)
        return self.selected(*args, **kwargs)

    @property
    def installed(self) -> bool:
        """Whether this object is in the slot."""
        return self._attributes.get(self._slot) is self

    @property
    def compiled_by_user(self) -> Callable[..., Any] | None:
        """The function that ``module.compile()`` had put into the slot."""
        is_ours = self._replaced is _ABSENT or isinstance(self._replaced, CallSlot)
        return None if is_ours else self._replaced

    def install(self) -> None:
        """Put this object into the slot, unless the user has replaced the method since an earlier run."""
        if not self.installed:
            self._replaced = self._attributes.get(self._slot, _ABSENT)
            if self.callee.method is None or self.compiled_by_user is None:
                object.__setattr__(self.callee.module, self._slot, self)

    def remove(self) -> None:
        """Restore the former value of the slot, unless the user has replaced this object."""
        if self.installed and self._replaced is _ABSENT:
            del self._attributes[self._slot]
        elif self.installed:
            object.__setattr__(self.callee.module, self._slot, self._replaced)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle contains the module's own method, so that a process can load it without this library.
        method = self.callee.method
        return (type(None), ()) if method is None else (getattr, (self.callee.module, method))


class Dispatcher(CallSlot):
    """Replaces the call of a target. `PhaseSwitch` sets the ``selected`` function."""

    session: Any = None
    """The session, if `report_of` and `restore` must find it from the module."""

    def remove(self) -> None:
        """Restore the former value of the slot, unless the user has replaced this object."""
        self.selected = self.eager  # the user may still have this object, for example in a wrapper
        super().remove()


class CallProbe(CallSlot):
    """Stands above the slot of a module or a method, and passes each call to a `TargetSearch`."""

    @property
    def below(self) -> Callable[..., Any]:
        """The function that a call runs without this probe."""
        below = self._attributes.get(self._slot)
        if not isinstance(below, Dispatcher):  # otherwise, the target was added after this probe was removed
            below = None if self._replaced is _ABSENT else self._replaced
        return below or self.eager


def compiled_target_names(module: nn.Module) -> list[str]:
    """Return the names of the submodules and methods that this library compiled in place."""
    return [
        (f"{path}.{slot}" if slot not in (_CALL_SLOT, "forward") else path).removeprefix(".") or "forward"
        for path, submodule in module.named_modules()
        for slot, value in vars(submodule).items()
        if isinstance(value, Dispatcher)
    ]
