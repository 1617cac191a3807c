"""The warnings of a session: settings without effect, targets without a graph, limits, and slow compiled steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.profiling.compile_events import CompileEvent, CompileKey, CompileRecorder, EventKind
from compile_callbacks.profiling.step_timer import RECENT_SAMPLES, StepTimer, median_ms, spread_ms
from compile_callbacks.runtime.dispatcher import PhaseSwitch
from compile_callbacks.runtime.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.runtime.phase_tuning import PhaseTuning

SAMPLES_TO_COMPARE = 5
"""Eager and compiled samples that are needed to say that compiled steps are slower."""

_CAUSES: dict[EventKind, str] = {
    "recompile": "recompile",
    "fallback": "fallback to eager",
    "cudagraph_skip": "CUDA graph that was skipped",
}
_IN_USERS_GRAPH = "A call inside a function that you compiled with torch.compile belongs to the graph of that function"


class SessionWarnings:
    """Warns once of each subject: when a session begins, when a stage ends, and when the run is over.

    Args:
        warn: Warns of each subject once.
        switch: Has the targets and their compiled compiled_targets.
        recorder: Has the compile events, and gets those of settings without effect.
        timer: Has the step times.
        tunings: The tuned phases. Only the report tells of the problems of their candidates.
        finds_targets: Whether the targets are found in the first steps, not named.
    """

    def __init__(
        self,
        warn: WarnOnce,
        *,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        timer: StepTimer,
        tunings: Mapping[Phase, PhaseTuning],
        finds_targets: bool = False,
    ) -> None:
        self._warn = warn
        self._switch = switch
        self._recorder = recorder
        self._timer = timer
        self._tunings = tunings
        self._finds_targets = finds_targets

    def check_settings(self, configs: Mapping[Phase, InductorConfig | None], *, sharded: bool, cuda: bool) -> None:
        """Warn of settings that have no effect on this module and this device."""
        for phase, config in configs.items():
            if config is None:
                continue
            mode = f"{phase}_mode={config.describe()!r}"
            if phase == "infer" and config.freezes and (sharded or self._switch.shares_graphs):
                why = WEIGHTS_ARE_SHARDED if sharded else "repeated blocks share a graph, and each has its own weights"
                message = f"{mode} asks for freezing, which has no effect: {why}"
                if self._warn((phase, "freezing"), message):
                    self._note("fold", phase, message)
            if config.uses_cudagraphs and not cuda:
                reason = f"{mode} asks for CUDA graphs, and the module is not on a GPU"
                if self._warn((phase, "cudagraphs"), f"{reason}: they have no effect"):
                    self._note("cudagraph_skip", phase, reason)

    def check_stage(self, phase: Phase, config: InductorConfig | None) -> None:
        """Warn of targets that ran in a stage without a compiled graph, and of weights that were not folded."""
        self._warn_of_limits()
        if self._is_uncalled(phase, config):
            names = ", ".join(repr(target.name) for target in self._switch.targets) or "there are none"
            message = (
                f"nothing is compiled in the {phase} phase, because its steps call none of the targets ({names}). "
                f"{_IN_USERS_GRAPH}; name other modules or methods in targets=[...]"
            )
            self._warn((phase, "uncalled"), message)
        for compiled_target in self._switch.compiled_targets(phase):
            if not compiled_target.ran or compiled_target.on_trial:
                continue
            if (why := self._why_uncompiled(compiled_target.key)) is not None:
                self._warn(compiled_target.key[:2], why)
            if compiled_target.blocks_differ:
                self._warn_of_differing_blocks(compiled_target.key)
        if config is not None and config.fold_weights:
            self._warn_of_folding(phase)

    def check_targets(self) -> None:
        """Warn of each named target that no phase called, when a fit is over."""
        called = {
            compiled_target.key.target
            for phase in PHASES
            for compiled_target in self._switch.compiled_targets(phase)
            if compiled_target.called
        }
        for target in self._switch.targets if called else ():
            if target.name not in called:
                message = f"target {target.name!r} was never called, so it is not compiled. {_IN_USERS_GRAPH}"
                self._warn((target.name, "uncalled"), message)

    def check_step_times(self, phases: Sequence[Phase]) -> None:
        """Warn if the latest compiled steps are slower than the eager ones."""
        for phase in phases:
            tuning = self._tunings.get(phase)
            if tuning is None or tuning.winner is not None:
                for subject, message in slower_steps(
                    phase, tuning.active_candidate if tuning else None, self._recorder, self._timer
                ):
                    self._warn(subject, message)

    def check_cache_dir(self) -> None:
        """Warn if torch cached nothing of what it compiled."""
        events = self._recorder.events
        cached = any(event.cache_hits or event.cache_misses for event in events)
        if not cached and any(event.graphs for event in events):
            message = (
                "cache_dir has no effect: torch did not use its cache. The cache is disabled, or the settings prevent "
                "its use (freezing does, and passes whose uuid() is None)"
            )
            self._warn("cache_dir", message)

    # ------------------------------------------------------------------------------------------ one subject each

    def _warn_of_limits(self) -> None:
        for key, reason in self._recorder.recompile_limits.items():
            tuning = self._tunings.get(key.phase)
            if tuning is not None and key.candidate != tuning.winner:
                continue
            message = (
                f"target {key.target!r} reached torch's recompile limit in the {key.phase} phase: inputs that fit "
                f"none of its graphs run eagerly. The reason of the last recompile: {reason} (all reasons: "
                f"callback.report.{key.phase}.diagnostics.events; if shapes are the cause, dynamic=True in "
                f"{key.phase}_mode or constant shapes need fewer graphs)"
            )
            self._warn((key, "limit"), message)

    def _is_uncalled(self, phase: Phase, config: InductorConfig | None) -> bool:
        """Whether steps of a phase ran compiled without calling a target."""
        tuning = self._tunings.get(phase)
        if config is None or (tuning is not None and tuning.winner is None):
            return False
        if not (self._switch.targets or self._finds_targets):
            return False  # a warning says why each of the named targets is not compiled
        settings = tuning.winner if tuning is not None else None
        called = any(compiled_target.called for compiled_target in self._switch.compiled_targets(phase))
        return not called and bool(self._timer.compiled_steps(phase, settings))

    def _why_uncompiled(self, key: CompileKey) -> str | None:
        """Why a target that ran has no compiled graph; ``None`` if it has one, or if a fallback was reported."""
        for event in self._recorder.events:
            same = (event.target, event.phase, event.candidate) == (key.target, key.phase, key.candidate)
            if same and (event.kind == "fallback" or event.graphs):
                return None
        breaks = self._reasons("graph_break", key)
        reason = breaks[-1] if breaks else "torch gives no reason; the target may compute nothing that can be compiled"
        return f"target {key.target!r} ran in the {key.phase} phase without a compiled graph: {reason}"

    def _warn_of_differing_blocks(self, key: CompileKey) -> None:
        reasons = self._reasons("recompile", key)
        why = f"; torch recompiled for the last one because of {reasons[-1]!r}" if reasons else ""
        message = (
            f"blocks {key.target!r} share no graph in the {key.phase} phase: torch compiled each of them, because "
            "they differ in a value that torch takes for constant, such as a number that the module holds"
            f"{why} (all reasons: callback.report.{key.phase}.diagnostics.events)"
        )
        self._warn((key[:2], "blocks"), message)

    def _warn_of_folding(self, phase: Phase) -> None:
        folds = self._recorder.events_of(phase, "fold")
        if any(event.folded_mib is not None for event in folds):
            return
        if any(event.graphs for event in self._recorder.events_of(phase, "compile")):
            reasons = [event.reason for event in folds if event.reason]
            nothing = "no inference graph computes anything worth keeping from weights alone"
            message = f"fold_weights=True has no effect in the {phase} phase: {reasons[-1] if reasons else nothing}"
            self._warn((phase, "fold"), message)

    def _reasons(self, kind: EventKind, key: CompileKey) -> list[str]:
        return [e.reason for e in self._recorder.events_of(key.phase, kind) if e.target == key.target and e.reason]

    def _note(self, kind: EventKind, phase: Phase, reason: str) -> None:
        for target in self._switch.targets:
            self._recorder.record(kind, CompileKey(target.name, phase), reason=reason)


def slower_steps(
    phase: Phase, candidate: str | None, recorder: CompileRecorder, timer: StepTimer
) -> Iterator[tuple[object, str]]:
    """Compare the latest compiled steps with eager steps of the same workload, beyond the spread of both.

    Args:
        phase: The phase.
        candidate: The candidate that the steps run with, if the phase is tuned.
        recorder: Has the compile events; the last one that may be the cause is named.
        timer: Has the step times.

    Yields:
        The subject, which is the same for the same cause, and the message.
    """
    found: list[tuple[float, str]] = []
    all_eager, all_compiled = timer.baseline(phase), timer.samples(phase, compiled=True, candidate=candidate)
    for workload in all_eager.keys() & all_compiled.keys():
        eager, latest = all_eager[workload], all_compiled[workload][-RECENT_SAMPLES:]
        if min(len(eager), len(latest)) < SAMPLES_TO_COMPARE:
            continue
        eager_ms, latest_ms = median_ms(eager) or 0, median_ms(latest) or 0
        if latest_ms - eager_ms > max(spread_ms(eager) or 0, spread_ms(latest) or 0):
            figures = f"{latest_ms:.2f} ms in the last {len(latest)}, eager {eager_ms:.2f} ms"
            found.append((latest_ms - eager_ms, f"compiled {phase} steps are slower than eager ones ({figures})"))
    if found:
        cause = _last_cause(phase, candidate, recorder)
        subject = phase, "slower", (cause.kind, cause.reason) if cause else None
        yield subject, f"{max(found)[1]}; {_describe(cause)}; {phase}_mode='eager' leaves the phase eager"


def _last_cause(phase: Phase, candidate: str | None, recorder: CompileRecorder) -> CompileEvent | None:
    events = (e for e in reversed(recorder.events) if e.phase == phase and e.candidate == candidate)
    return next((event for event in events if event.kind in _CAUSES), None)


def _describe(cause: CompileEvent | None) -> str:
    if cause is None:
        return "torch reports no cause: no recompile, fallback or skipped CUDA graph"
    reason = " ".join((cause.reason or "torch gives no reason").split())
    return f"the last {_CAUSES[cause.kind]} of target {cause.target!r}: {reason}"
