"""What a session has to say of settings without effect, limits that were reached, and steps that became slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compile_callbacks.compiling.once import WarnOnce
from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Scope
from compile_callbacks.measuring.events import CompileRecorder, EventKind, Owner
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.watch import Watch
from compile_callbacks.phases import Phase
from compile_callbacks.reporting.idle import (
    differing_blocks,
    idle_cache_dir,
    idle_cudagraphs,
    idle_folding,
    idle_freezing,
    limits_reached,
    why_uncompiled,
)
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.tuning.tuning import PhaseTuning
from compile_callbacks.warm_start.warm_start import WarmStart


class SessionWarnings:
    """Says once each what a user has to know of a session, when it begins, when a stage ends, and when it is over.

    Args:
        warn: Warns of each subject once.
        switch: Knows the targets and what they are compiled to.
        recorder: Knows what happened while compiling, and is told of settings without effect.
        timer: Knows the steps' times.
        tunings: What is tried, in the phases that are tuned: a candidate's troubles are told of in the report alone.
        scope: How the targets compile the module, where they compile all of it.
    """

    def __init__(
        self,
        warn: WarnOnce,
        *,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        timer: StepTimer,
        tunings: Mapping[Phase, PhaseTuning],
        scope: Scope | None,
    ) -> None:
        self._warn = warn
        self._switch = switch
        self._recorder = recorder
        self._tunings = tunings
        self._scope = scope
        self._watch = Watch(recorder, timer)

    def of_settings(self, configs: Mapping[Phase, InductorConfig | None], *, sharded: bool, cuda: bool) -> None:
        """Settings that can have no effect on this module and this device."""
        for phase, config in configs.items():
            for message in idle_freezing(phase, config, shared=self._switch.shares_graphs, sharded=sharded):
                if self._warn((phase, "freezing"), message, "freezing-has-no-effect"):
                    self._note("fold", phase, message)
            for reason in idle_cudagraphs(phase, config, cuda=cuda):
                if self._warn((phase, "cudagraphs"), f"{reason}: they have no effect", "cuda-graphs-without-a-gpu"):
                    self._note("cudagraph_skip", phase, reason)

    def of_stage(self, phase: Phase, config: InductorConfig | None) -> None:
        """What ran in a stage and was not compiled, and what compiling did not give."""
        for owner, message in limits_reached(self._recorder):
            if not self._is_tried(owner):
                self._warn((owner, "limit"), message, "recompile-limit")
        for region in self._switch.regions(phase):
            if region.ran and not region.on_trial and (why := why_uncompiled(region.owner, self._recorder)):
                self._warn(region.owner[:2], why, "no-compiled-graph")
            if self._scope == "repeated" and region.blocks_differ and not region.on_trial:
                message = differing_blocks(region.owner, self._recorder)
                self._warn((region.owner[:2], "blocks"), message, "repeated-blocks-differ")
        for message in idle_folding(phase, config, self._recorder):
            self._warn((phase, "fold"), message, "nothing-is-folded")

    def of_steps(self, phases: Sequence[Phase]) -> None:
        """Compiled steps that turn out slower than eager ones, and the cause."""
        for phase in phases:
            tuning = self._tunings.get(phase)
            if tuning is None or tuning.winner is not None:
                for subject, message in self._watch.look(phase, tuning.in_force if tuning else None):
                    self._warn(subject, message, "slower-than-eager")

    def of_cache_dir(self, warm_start: WarmStart) -> None:
        """A folder in which nothing could be kept."""
        for message in idle_cache_dir(warm_start, self._recorder):
            self._warn("cache_dir", message, "nothing-to-keep")

    def _is_tried(self, owner: Owner) -> bool:
        """Whether something happened to a candidate that is not chosen."""
        return owner.phase in self._tunings and owner.settings != self._tunings[owner.phase].winner

    def _note(self, kind: EventKind, phase: Phase, reason: str) -> None:
        for target in self._switch.targets:
            self._recorder.add(kind, Owner(target.name, phase), reason=reason)
