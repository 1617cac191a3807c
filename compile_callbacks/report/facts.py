"""`PhaseFacts`: the measurements of a phase, the only part of the report that reads recorder, timer and memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compile_callbacks._utils.phases import WAITING, Phase

if TYPE_CHECKING:  # because ``compile-callbacks check`` does not import torch
    from compile_callbacks.profiling.events import CompileKey
    from compile_callbacks.profiling.memory import Peak, PeakMemory
    from compile_callbacks.profiling.recorder import CompileRecorder
    from compile_callbacks.profiling.savings import Savings
    from compile_callbacks.profiling.step_timer import StepTimer, StepTimes
    from compile_callbacks.tuning.tune import PhaseConfig


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    """The measurements of a phase, from which the figures are computed. With a `Tune`, of the chosen candidate."""

    phase: Phase
    settings: PhaseConfig
    target_labels: Mapping[str, Callable[[int], str]]  # the label of a target, by its name, from its number of graphs
    recorder: CompileRecorder
    timer: StepTimer
    memory: PeakMemory
    trials: tuple[dict[str, Any], ...]
    waits: bool  # whether the helper process still compiles a graph

    @functools.cached_property
    def candidate(self) -> str | None:
        """The chosen candidate of a `Tune`."""
        return chosen_candidate(self.trials)

    @functools.cached_property
    def times(self) -> StepTimes:
        """The step times of the workload with the most samples."""
        return self.timer.times(self.phase, self.candidate)

    @functools.cached_property
    def steps(self) -> Counter[Any]:
        """The number of steps by kind."""
        return self.timer.steps(self.phase, self.candidate)

    @property
    def series(self) -> tuple[dict[str, Any], ...]:
        """The step times in order, of all candidates."""
        return self.timer.series(self.phase)

    @property
    def waiting_steps(self) -> int:
        """The number of steps while the helper process compiled."""
        return self.timer.steps(self.phase, WAITING).total()

    @property
    def waiting_ms(self) -> list[float]:
        """The times of these steps."""
        windows = self.timer.windows(self.phase, WAITING, "eager")
        return [ms for workload in windows if workload == self.times.workload for of in windows[workload] for ms in of]

    def peak(self, variant: str | None) -> Peak:
        """Return the peak memory of the steps of a variant."""
        return self.memory.peak(self.phase, variant)

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """The events of all candidates, in order."""
        return tuple(event.to_dict() for event in self.recorder.events if event.phase == self.phase)

    @property
    def passes(self) -> tuple[dict[str, Any], ...]:
        """The runs of graph passes, in order."""
        return tuple({"target": key.target, **run} for key, run in self.recorder.pass_runs if self._counts(key))

    @property
    def eager_calls(self) -> Counter[str]:
        """The number of calls by target that ran eagerly."""
        calls: Counter[str] = Counter()
        for key, number in self.recorder.executions.eager_calls.items():
            calls[key.target] += number if self._counts(key) else 0
        return +calls

    @functools.cached_property
    def savings(self) -> Savings | None:
        """The time that compiling saved, or ``None`` if nothing was compiled or compared."""
        from compile_callbacks.profiling.savings import savings  # imported here, because it imports torch

        compiles = [event for event in self.recorder.events if event.kind == "compile"]
        ours = [event for event in compiles if event.phase == self.phase]
        if not ours:
            return None
        outside_steps = self.recorder.import_seconds if compiles[0] is ours[0] else 0.0
        outside_steps += sum(event.seconds or 0 for event in ours if event.step is None)
        return savings(self.timer, self.phase, self.candidate, outside_steps)

    def _counts(self, key: CompileKey) -> bool:
        return key.phase == self.phase and self.candidate in (None, key.candidate)


def chosen_candidate(trials: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the name of the candidate that a `Tune` chose."""
    return next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None)
