"""`PhaseSwitch`: selects the function that each `Dispatcher` of a session calls."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Mapping, Sequence
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
from compile_callbacks.graphs.target_log import TargetSettings
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.targets.target import Target


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
        uncompiled: frozenset[Phase] = frozenset(),
        recorder: CompileRecorder,
        settings: TargetSettings | None = None,
        warn: WarnOnce | None = None,
        observed: CallRecords | None = None,
    ) -> None:
        self._observed = observed or CallRecords()
        self._uncompiled = uncompiled
        self._recorder = recorder
        self._settings = settings or TargetSettings()
        self._warn = warn or WarnOnce()
        self._dispatchers: dict[Target, list[Dispatcher]] = {}
        self._compiled_targets: dict[tuple[Target, Phase, str | None, bool], CompiledTarget] = {}
        self._installed = False
        self._decided: set[Phase] = set()  # the phases whose variants are not on trial
        self._selected: tuple[Phase, Variant, bool] | None = None
        self.add(targets)

    # ------------------------------------------------------------------------------------------ targets

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets."""
        return tuple(self._dispatchers)

    def add(self, targets: Sequence[Target]) -> None:
        """Add targets. They run the selected variant, or eagerly until the first `select`."""
        for target in targets:
            self._dispatchers[target] = [Dispatcher(member) for member in target.members]
            for dispatcher in self._dispatchers[target] if self._installed else ():
                dispatcher.install()
            if self._selected is not None:
                self._select_for(target, *self._selected)

    def discard(self, targets: Collection[Target]) -> None:
        """Remove targets, restore their modules, and free their compiled code."""
        for target in targets:
            for dispatcher in self._dispatchers.pop(target):
                dispatcher.remove()
        self._free([key for key in self._compiled_targets if key[0] in targets])

    def set_session(self, session: Any) -> None:
        """Let `report_of` and `restore` find the session from the module. A registry would keep the module alive."""
        for dispatcher in self._all_dispatchers():
            dispatcher.session = session

    def install(self) -> None:
        """Install the dispatchers. The targets run eagerly until a phase is selected."""
        self._selected = None
        for dispatcher in self._all_dispatchers():
            dispatcher.selected = dispatcher.eager
            if not self._installed:
                dispatcher.install()
        self._installed = True

    def remove(self) -> None:
        """Remove the dispatchers."""
        for dispatcher in self._all_dispatchers() if self._installed else ():
            dispatcher.remove()
        self._installed = False
        self._selected = None

    # ------------------------------------------------------------------------------------------ phases

    def select(self, phase: Phase, variant: Variant, *, weights_frozen: bool = False) -> None:
        """Run the targets with a variant from now on.

        With ``weights_frozen``, the weights are constant, so that the code may contain them. If the phase will be
        compiled, eager calls record the shapes of their inputs.
        """
        selected = phase, variant, weights_frozen
        if self._selected == selected:  # skip most steps, because a change takes 10 µs for each target
            return
        for target in self._dispatchers:
            self._select_for(target, phase, variant, weights_frozen)
        self._selected = selected

    def _select_for(self, target: Target, phase: Phase, variant: Variant, weights_frozen: bool) -> None:
        for dispatcher in self._dispatchers[target]:
            dispatcher.selected = self._call_of(
                target, dispatcher, phase, variant, weights_frozen=weights_frozen, in_stage=True
            )

    def select_by_grad_mode(self, variants: Mapping[Phase, Variant], *, weights_frozen: bool = False) -> None:
        """Let the grad mode of each call select the phase: train if grad is enabled, else infer."""
        self._selected = None
        for target, dispatchers in self._dispatchers.items():
            for dispatcher in dispatchers:
                dispatcher.selected = _by_grad_mode(
                    self._call_of(target, dispatcher, "train", variants["train"]),
                    self._call_of(target, dispatcher, "infer", variants["infer"], weights_frozen=weights_frozen),
                )

    def _call_of(
        self,
        target: Target,
        dispatcher: Dispatcher,
        phase: Phase,
        variant: Variant,
        *,
        weights_frozen: bool = False,
        in_stage: bool = False,
    ) -> Callable[..., Any]:
        """Return the function that a target runs in a phase. In a stage, frozen weights may change only a few times."""
        if phase in self._uncompiled:
            return dispatcher.compiled_by_user or dispatcher.eager
        config = variant.config
        if config is None:
            return self._observed.of(target.name, phase).recording(dispatcher.eager, dispatcher.callee.module)
        frozen = weights_frozen and phase == "infer" and config.freezes and self._can_freeze(target, variant)
        unfrozen = self._compiled_target(target, phase, variant) if frozen and in_stage else None
        return functools.partial(
            self._compiled_target(target, phase, variant, frozen=frozen, unfrozen=unfrozen).call, dispatcher.callee
        )

    def _compiled_target(
        self,
        target: Target,
        phase: Phase,
        variant: Variant,
        *,
        frozen: bool = False,
        unfrozen: CompiledTarget | None = None,
    ) -> CompiledTarget:
        key = target, phase, variant.name, frozen
        if key not in self._compiled_targets:
            assert variant.config is not None
            settings = self._settings if phase in self._decided or not variant.name else self._settings.for_trial()
            self._compiled_targets[key] = CompiledTarget(
                target,
                CompileKey(target.name, phase, frozen, variant.name),
                variant.config,
                recorder=self._recorder,
                warn=self._warn,
                settings=replace(settings, may_guess=not variant.healed),
                unfrozen=unfrozen,
                observed=self._observed.of(target.name, phase),
            )
        return self._compiled_targets[key]

    def _can_freeze(self, target: Target, variant: Variant) -> bool:
        member = target.members[0]
        if member.sharded:
            reason: str | None = WEIGHTS_ARE_SHARDED
        elif target.shares_code:
            reason = "repeated blocks share a graph, but not their weights"
        else:
            reason = unwatchable_reason(member.module)
        if reason is None:
            return True
        key = CompileKey(target.name, "infer", candidate=variant.name)
        message = f"freezing has no effect on target {target.name!r} in the infer phase: {reason}"
        if all(event.reason != message for event in self._recorder.events_of(key, "freezing")):
            self._recorder.record("freezing", key, reason=message, show=False)
            # Nobody asked for the candidates of "auto". Of sharded weights, one rank warns when the run begins.
            if variant.name is None and not member.sharded:
                self._warn.warn("CC204", message, about=(reason, "freezing"))
        return False

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
        of_phase = [key for key in self._compiled_targets if key[1] == phase]
        self._free([key for key in of_phase if key[2] not in variants])
        for key in of_phase:
            if key[2] in variants and not on_trial:
                self._compiled_targets[key].log.settings = self._settings  # its next call issues its warnings

    def free_compiled(self) -> None:
        """Free the memory of all compiled code. The next call of a target compiles it again."""
        for compiled_target in self.compiled_targets():
            compiled_target.backend.free()
        gc.collect()  # generated code has reference cycles

    def invalidate_weights(self) -> None:
        """Compare frozen weights with the module's weights before their next use."""
        for compiled_target in self.compiled_targets():
            compiled_target.invalidate_weights()

    def _free(self, keys: Collection[Any]) -> None:
        for key in keys:
            self._compiled_targets.pop(key).backend.free()
        if keys:
            gc.collect()  # generated code has reference cycles

    def _all_dispatchers(self) -> list[Dispatcher]:
        return [dispatcher for dispatchers in self._dispatchers.values() for dispatcher in dispatchers]


def _by_grad_mode(train: Callable[..., Any], infer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs) if torch.is_grad_enabled() else infer(*args, **kwargs)

    return call
