"""`PhaseSwitch`: selects the function that each `Dispatcher` of a session calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.compiled_target import CompiledTarget
from compile_callbacks.calls.dispatcher import Dispatcher
from compile_callbacks.calls.frozen_weights import unwatchable_reason
from compile_callbacks.calls.observed_calls import CallRecords
from compile_callbacks.config.inductor_config import Variant
from compile_callbacks.graphs.target_log import TargetLog, TargetSettings
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.targets.target import Target

_Selected = tuple[Phase, Variant, bool]
"""A phase, what it runs, and whether the weights are constant, so that the code may contain them."""


class PhaseSwitch:
    """Makes the dispatchers of a session call the compiled code of the active phase.

    There is no wrapper module: the ``state_dict``, ``isinstance``, hooks and optimizers use the original modules. For
    each target, phase and variant, the switch creates a `CompiledTarget` when they are first selected. torch compiles
    at the first call of the `CompiledTarget`. If the config freezes, the switch creates another `CompiledTarget` with
    frozen weights for stages with constant weights.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        uncompiled: frozenset[Phase],
        recorder: CompileRecorder,
        settings: TargetSettings,
        warn: WarnOnce,
    ) -> None:
        self.observed = CallRecords()
        self._uncompiled, self.recorder, self._settings, self._warn = uncompiled, recorder, settings, warn
        self._dispatchers = {target: list(map(Dispatcher, target.members)) for target in targets}
        self._compiled_targets: dict[tuple[Target, Phase, str | None, bool], CompiledTarget] = {}
        self._decided: set[Phase] = set()  # the phases whose variants are not on trial
        self._selected: tuple[_Selected, ...] = ()  # the active phase; if the grad mode selects one, train and infer

    # ------------------------------------------------------------------------------------------ targets

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets."""
        return tuple(self._dispatchers)

    def dispatchers(self) -> Iterator[Dispatcher]:
        """Yield the dispatchers of all targets."""
        for dispatchers in self._dispatchers.values():
            yield from dispatchers

    def add(self, targets: Sequence[Target]) -> None:
        """Add targets in a run. They run the selected variant."""
        for target in targets:
            self._dispatchers[target] = list(map(Dispatcher, target.members))
            for dispatcher in self._dispatchers[target]:
                dispatcher.install()
            self._select_for(target)

    def discard(self, targets: Collection[Target]) -> None:
        """Remove targets, restore their modules, and free their compiled code."""
        for target in targets:
            for dispatcher in self._dispatchers.pop(target):
                dispatcher.remove()
        self._free([key for key in self._compiled_targets if key[0] in targets])

    def install(self) -> None:
        """Install the dispatchers. The targets run eagerly until a phase is selected."""
        self._selected = ()
        for dispatcher in self.dispatchers():
            dispatcher.selected = dispatcher.eager
            dispatcher.install()

    def remove(self) -> None:
        """Remove the dispatchers."""
        self._selected = ()
        for dispatcher in self.dispatchers():
            dispatcher.remove()

    # ------------------------------------------------------------------------------------------ phases

    def select(self, phase: Phase, variant: Variant, *, weights_frozen: bool) -> None:
        """Run the targets with a variant from now on.

        If the phase will be compiled, eager calls record the shapes of their inputs.
        """
        if self._selected != (selected := ((phase, variant, weights_frozen),)):
            self._select(*selected)

    def select_by_grad_mode(self, variants: Mapping[Phase, Variant], *, weights_frozen: bool = False) -> None:
        """Let the grad mode of each call select the phase: train if grad is enabled, else infer."""
        self._select(("train", variants["train"], weights_frozen), ("infer", variants["infer"], weights_frozen))

    def _select(self, *selected: _Selected) -> None:
        self._selected = selected
        for target in self._dispatchers:
            self._select_for(target)

    def _select_for(self, target: Target) -> None:
        for dispatcher in self._dispatchers[target] if self._selected else ():
            calls = [self._call_of(target, dispatcher, *selected) for selected in self._selected]
            dispatcher.selected = calls[0] if len(calls) == 1 else functools.partial(_call_by_grad_mode, *calls)

    def _call_of(
        self, target: Target, dispatcher: Dispatcher, phase: Phase, variant: Variant, weights_frozen: bool
    ) -> Callable[..., Any]:
        """Return the function that a target runs in a phase."""
        if phase in self._uncompiled:
            return dispatcher.compiled_by_user or dispatcher.eager
        observed, config = self.observed.of(target.name, phase), variant.config
        if config is None:
            return observed.recording(dispatcher.eager)
        frozen = weights_frozen and phase == "infer" and config.freezes and self._can_freeze(target, variant)
        key = target, phase, variant.name, frozen
        if (compiled := self._compiled_targets.get(key)) is not None and compiled.config is not config:
            self._free([key])  # the phase continues in another mode
            compiled = None
        if compiled is None:
            settings = self._settings if phase in self._decided or not variant.name else self._settings.for_trial()
            settings = replace(settings, may_guess=not variant.healed, static=variant.static)
            log = TargetLog(CompileKey(target.name, phase, variant.name), self.recorder, settings, self._warn)
            compiled = self._compiled_targets[key] = CompiledTarget(target, config, log, observed, frozen=frozen)
        return functools.partial(compiled.call, dispatcher.callee)

    def _can_freeze(self, target: Target, variant: Variant) -> bool:
        if target.members[0].sharded:
            return False  # the session warns about it
        if (reason := unwatchable_reason(target)) is None:
            return True
        key = CompileKey(target.name, "infer", variant.name)
        message = f"freezing has no effect on target {target.name!r} in the infer phase: {reason}"
        if all(event.reason != message for event in self.recorder.events_of(key, "freezing")):
            self.recorder.record("freezing", key, reason=message)
        if variant.name is None:  # nobody asked for the candidates of "auto"
            self._warn.warn("CC204", message, about=(reason, "freezing"))
        return False

    # ------------------------------------------------------------------------------------------ compiled code

    def compiled_targets(self, phase: Phase | None = None) -> list[CompiledTarget]:
        """Return the compiled targets of a phase, or of all phases."""
        return [compiled for key, compiled in self._compiled_targets.items() if phase in (None, key[1])]

    def devices(self) -> set[torch.device]:
        """Return the devices of the targets' weights."""
        members = [member.module for target in self.targets for member in target.members]
        return {weight.device for module in members for weight in module.parameters()}

    def called_targets(self, phase: Phase) -> set[str]:
        """Return the names of the targets that compiled steps of a phase called."""
        return {compiled.key.target for compiled in self.compiled_targets(phase) if compiled.called}

    def free_other_variants(self, phase: Phase, variants: Collection[str | None], *, on_trial: bool) -> None:
        """Free the compiled code of a phase, except for these variants. Their trial ends unless they are on trial."""
        (self._decided.discard if on_trial else self._decided.add)(phase)
        self._free([key for key in self._compiled_targets if key[1] == phase and key[2] not in variants])
        for compiled in () if on_trial else self.compiled_targets(phase):
            of_variant = {name: getattr(compiled.log.settings, name) for name in ("may_guess", "static")}
            compiled.log.settings = replace(self._settings, **of_variant)  # its next call issues its warnings

    def free_compiled(self) -> None:
        """Free all compiled code. The next call of a target compiles it again."""
        for compiled in self.compiled_targets():
            compiled.backend.free()
        gc.collect()  # generated code has reference cycles

    def invalidate_weights(self) -> None:
        """Compare frozen weights with the module's weights before their next use."""
        for compiled in self.compiled_targets():
            if compiled.weights is not None:
                compiled.weights.are_suspect = True

    def _free(self, keys: Collection[Any]) -> None:
        for key in keys:
            self._compiled_targets.pop(key).backend.free()
        if keys:
            gc.collect()  # generated code has reference cycles


def _call_by_grad_mode(train: Callable[..., Any], infer: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return train(*args, **kwargs) if torch.is_grad_enabled() else infer(*args, **kwargs)
