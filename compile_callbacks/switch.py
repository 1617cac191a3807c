"""The phase switch: puts compiled callables on modules, selects the phase's, and takes them off again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.config import InductorConfig
from compile_callbacks.events import CompileRecorder
from compile_callbacks.phases import Phase
from compile_callbacks.region import CompiledRegion, OnError
from compile_callbacks.targets import Target

_CALL_SLOT = "_compiled_call_impl"  # what nn.Module.compile() sets, and nn.Module.__call__ looks at


class Dispatcher:
    """Stands in a target's slot and calls what is selected: a compiled region, or the module itself.

    An object and not a closure, so that a copy or a pickle of the module can leave it behind: a copied call
    would run the original's weights.
    """

    def __init__(self, target: Target, regions: Mapping[Phase, CompiledRegion]) -> None:
        self.target = target
        self.regions = regions
        self.eager = target.eager
        self.selected: Callable[..., Any] = self.eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is selected."""
        if torch.compiler.is_compiling():  # inside another target's trace, or an export: be part of its graph
            return self.eager(*args, **kwargs)
        return self.selected(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.target.method is None:
            return type(None), ()
        return _own_method, (self.target.module, self.target.method)

    def by_grad_mode(self, *args: Any, **kwargs: Any) -> Any:
        """Call the region of the phase that the grad mode tells; for when no trainer selects one."""
        region = self.regions.get("train" if torch.is_grad_enabled() else "infer")
        return self.eager(*args, **kwargs) if region is None else region(*args, **kwargs)


class PhaseSwitch:
    """Compiles targets with one set of settings a phase, in place, and selects between them.

    Nothing is compiled before a target is called. No wrapper module exists: ``state_dict`` keys,
    ``isinstance``, hooks and optimizers see the original modules.

    Args:
        targets: What is compiled.
        configs: The settings by phase; ``None`` leaves a phase eager.
        passes: Graph passes for both phases, before those of each config.
        recorder: Told of everything that happens while compiling.
        on_error: What a compiler failure does.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        configs: Mapping[Phase, InductorConfig | None],
        *,
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        on_error: OnError = "eager",
    ) -> None:
        self.targets = tuple(targets)
        self._dispatchers = [
            Dispatcher(
                target,
                {
                    phase: CompiledRegion(target, phase, config, passes=passes, recorder=recorder, on_error=on_error)
                    for phase, config in configs.items()
                    if config is not None
                },
            )
            for target in targets
        ]
        self._quiet_tracing = _torch.QuietTracing(lambda: recorder.owner is not None)
        self._before: list[tuple[nn.Module, str, Any]] | None = None

    @property
    def installed(self) -> bool:
        """Whether the targets call through this switch."""
        return self._before is not None

    def install(self) -> None:
        """Put a dispatcher on each target; it calls the module itself until a phase is selected."""
        if self.installed:
            return
        self._before = []
        self._quiet_tracing.install()
        for dispatcher in self._dispatchers:
            module, slot = dispatcher.target.module, dispatcher.target.method or _CALL_SLOT
            self._before.append((module, slot, vars(module).get(slot, _ABSENT)))
            object.__setattr__(module, slot, dispatcher)

    def select(self, phase: Phase, *, compiled: bool = True) -> None:
        """Have the targets run with a phase's settings, or eagerly where ``compiled`` is false."""
        for dispatcher in self._dispatchers:
            region = dispatcher.regions.get(phase) if compiled else None
            dispatcher.selected = dispatcher.eager if region is None else region

    def select_by_grad_mode(self) -> None:
        """Have each call choose: the train settings where grad is enabled, else the infer settings."""
        for dispatcher in self._dispatchers:
            dispatcher.selected = dispatcher.by_grad_mode

    def remove(self) -> None:
        """Leave every module as it was before `install`."""
        for module, slot, before in self._before or ():
            if before is _ABSENT:
                vars(module).pop(slot, None)
            else:
                object.__setattr__(module, slot, before)
        self._quiet_tracing.remove()
        self._before = None

    def regions(self, phase: Phase) -> list[CompiledRegion]:
        """The compiled regions of a phase, one a target; none where the phase is left eager."""
        return [d.regions[phase] for d in self._dispatchers if phase in d.regions]


_ABSENT = object()


def _own_method(module: nn.Module, name: str) -> Any:
    return getattr(type(module), name).__get__(module)
