"""`PhaseSwitch`: selects the function that each `Dispatcher` of a session calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.targets.target import Target


class _Selected(NamedTuple):
    phase: Phase
    variant: Variant
    weights_frozen: bool  # the weights are constant, so that the code may contain them


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
        observed: CallRecords,
    ) -> None:
        self._uncompiled, self._recorder, self._settings = uncompiled, recorder, settings
        self._warn, self._observed = warn, observed
        self._dispatchers = {target: _dispatchers_of(target) for target in targets}
        self._compiled_targets: dict[tuple[Target, Phase, str | None, bool], CompiledTarget] = {}
        self._decided: set[Phase] = set()  # the phases whose variants are not on trial
        self._selected: _Selected | None = None

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
            self._dispatchers[target] = _dispatchers_of(target)
            for dispatcher in self._dispatchers[target]:
                dispatcher.install()
            if self._selected is not None:
                self._select_for(target, self._selected)

    def discard(self, targets: Collection[Target]) -> None:
        """Remove targets, restore their modules, and free their compiled code."""
        for target in targets:
            for dispatcher in self._dispatchers.pop(target):
                dispatcher.remove()
        self._free([key for key in self._compiled_targets if key[0] in targets])

    def install(self) -> None:
        """Install the dispatchers. The targets run eagerly until a phase is selected."""
        self._selected = None
        for dispatcher in self.dispatchers():
            dispatcher.selected = dispatcher.eager
            dispatcher.install()

    def remove(self) -> None:
        """Remove the dispatchers."""
        self._selected = None
        for dispatcher in self.dispatchers():
            dispatcher.remove()

    # ------------------------------------------------------------------------------------------ phases

    def select(self, phase: Phase, variant: Variant, *, weights_frozen: bool = False) -> None:
        """Run the targets with a variant from now on.

        If the phase will be compiled, eager calls record the shapes of their inputs.
        """
        selected = _Selected(phase, variant, weights_frozen)
        if self._selected != selected:  # skip most steps, because a change takes 10 µs for each target
            for target in self._dispatchers:
                self._select_for(target, selected)
            self._selected = selected

    def select_by_grad_mode(self, variants: Mapping[Phase, Variant], *, weights_frozen: bool = False) -> None:
        """Let the grad mode of each call select the phase: train if grad is enabled, else infer."""
        self._selected = None
        train, infer = (_Selected(phase, variants[phase], weights_frozen) for phase in ("train", "infer"))
        for target, dispatchers in self._dispatchers.items():
            for dispatcher in dispatchers:
                calls = self._call_of(target, dispatcher, train), self._call_of(target, dispatcher, infer)
                dispatcher.selected = _by_grad_mode(*calls)

    def _select_for(self, target: Target, selected: _Selected) -> None:
        for dispatcher in self._dispatchers[target]:
            dispatcher.selected = self._call_of(target, dispatcher, selected)

    def _call_of(self, target: Target, dispatcher: Dispatcher, selected: _Selected) -> Callable[..., Any]:
        """Return the function that a target runs in a phase."""
        (phase, variant, weights_frozen), config = selected, selected.variant.config
        if phase in self._uncompiled:
            return dispatcher.compiled_by_user or dispatcher.eager
        if config is None:
            return self._observed.of(target.name, phase).recording(dispatcher.eager, dispatcher.callee.module)
        frozen = weights_frozen and phase == "infer" and config.freezes and self._can_freeze(target, variant)
        key = target, phase, variant.name, frozen
        if (compiled := self._compiled_targets.get(key)) is None:
            settings = self._settings if phase in self._decided or not variant.name else self._settings.for_trial()
            settings = replace(settings, may_guess=not variant.healed)
            log = TargetLog(CompileKey(target.name, phase, variant.name), self._recorder, settings, self._warn)
            observed = self._observed.of(target.name, phase)
            compiled = CompiledTarget(target, config, log, observed, frozen=frozen)
            self._compiled_targets[key] = compiled
        return functools.partial(compiled.call, dispatcher.callee)

    def _can_freeze(self, target: Target, variant: Variant) -> bool:
        member = target.members[0]
        if member.sharded:
            reason: str | None = WEIGHTS_ARE_SHARDED
        elif target.shares_code:
            reason = "repeated blocks share a graph, but not their weights"
        else:
            reason = unwatchable_reason(member.module)
        if reason is not None:
            key = CompileKey(target.name, "infer", variant.name)
            message = f"freezing has no effect on target {target.name!r} in the infer phase: {reason}"
            if all(event.reason != message for event in self._recorder.events_of(key, "freezing")):
                self._recorder.record("freezing", key, reason=message, show=False)
            # Nobody asked for the candidates of "auto". Of sharded weights, one rank warns when the run begins.
            if variant.name is None and not member.sharded:
                self._warn.warn("CC204", message, about=(reason, "freezing"))
        return reason is None

    # ------------------------------------------------------------------------------------------ compiled code

    def compiled_targets(self, phase: Phase | None = None) -> list[CompiledTarget]:
        """Return the compiled targets of a phase, or of all phases."""
        return [compiled for key, compiled in self._compiled_targets.items() if phase in (None, key[1])]

    def called_targets(self, phase: Phase) -> set[str]:
        """Return the names of the targets that compiled steps of a phase called."""
        return {compiled.key.target for compiled in self.compiled_targets(phase) if compiled.called}

    def free_other_variants(self, phase: Phase, variants: Collection[str | None], *, on_trial: bool) -> None:
        """Free the compiled code of a phase, except for these variants. Their trial ends unless they are on trial."""
        (self._decided.discard if on_trial else self._decided.add)(phase)
        self._free([key for key in self._compiled_targets if key[1] == phase and key[2] not in variants])
        for compiled in () if on_trial else self.compiled_targets(phase):
            compiled.log.settings = self._settings  # its next call issues its warnings

    def free_compiled(self) -> None:
        """Free the memory of all compiled code. The next call of a target compiles it again."""
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


def _dispatchers_of(target: Target) -> list[Dispatcher]:
    return [Dispatcher(member) for member in target.members]


def _by_grad_mode(train: Callable[..., Any], infer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs) if torch.is_grad_enabled() else infer(*args, **kwargs)

    return call
