"""`PhaseFacts`: the measurements of a phase, from which `PhaseReport.of` computes each figure."""

# ruff: noqa: D102  (`data` describes the figures)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.config.inductor_config import WAITING_VARIANT
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.events import CompileEvent, CompilePart, EventKind, Result, Verdict
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.savings import Savings, savings
from compile_callbacks.profiling.step_timer import StepTimer, StepTimes
from compile_callbacks.profiling.steps import StepKind
from compile_callbacks.tuning.tune import PhaseConfig


@dataclass(frozen=True, kw_only=True)
class PhaseFacts:
    """The measurements of a phase. With a `Tune`, most are those of the chosen candidate."""

    phase: Phase
    settings: PhaseConfig
    target_labels: Mapping[str, Callable[[int], str]]  # the label of a target, by its name, from its number of graphs
    recorder: CompileRecorder
    timer: StepTimer
    memory: PeakMemory
    trials: tuple[dict[str, Any], ...]
    waits: bool  # whether the helper process still compiles a graph
    with_details: bool  # whether the verdict, the series and the events are needed

    @cached_property
    def candidate(self) -> str | None:
        return next((trial["candidate"] for trial in self.trials if trial["verdict"] == "chosen"), None)

    @property
    def _config(self) -> PhaseConfig:
        return None if self.candidate == EAGER else self.settings

    # ------------------------------------------------------------------------------------------ events

    @cached_property
    def _events(self) -> list[CompileEvent]:
        events = [event for event in self.recorder.events if event.phase == self.phase]
        return [event for event in events if self.candidate is None or event.candidate in (None, self.candidate)]

    def events(self, kind: EventKind) -> list[CompileEvent]:
        """Return the events of a kind."""
        return [event for event in self._events if event.kind == kind]

    def seconds(self, kind: EventKind, part: CompilePart | None = None) -> float | None:
        """Return the duration of all events of a kind and part, or ``None`` without such an event."""
        events = [event for event in self.events(kind) if part in (None, event.part)]
        return sum(event.seconds or 0 for event in events) if events else None

    def values(self, attribute: str) -> list[Any]:
        """Return the values of an attribute of all events that have it."""
        return [value for event in self._events if (value := getattr(event, attribute)) is not None]

    @property
    def mode(self) -> str:
        return self.candidate or (self._config.describe() if self._config else EAGER)

    @property
    def targets(self) -> tuple[str, ...]:
        graphs: Counter[str] = Counter()
        for event in self._events:
            graphs[event.target] += event.graphs
        labels = self.target_labels if self._config else {}
        return tuple(label(graphs[name]) for name, label in labels.items())

    @property
    def saved_mib(self) -> float | None:
        saved: dict[str, float] = {}
        for event in self._events:
            if event.saved_mib is not None:
                saved[event.target] = max(saved.get(event.target, 0.0), event.saved_mib)
        return sum(saved.values()) if saved else None

    @property
    def comparisons(self) -> str | None:
        counts: Counter[tuple[Result, str]] = Counter()
        noisy = sum(event.noisy_tensors for event in self.events("verify"))
        tensors = sum(event.tensors for event in self.events("verify"))
        for event in self.events("verify"):
            if event.verdict is not None:
                why_not = f" ({event.why_not})" if event.why_not else ""
                counts[event.verdict, why_not] += 1
        order = Result.__args__  # type: ignore[attr-defined]
        ordered = sorted(counts.items(), key=lambda item: order.index(item[0][0]))
        results = [f"{result} {count}{why_not}" for (result, why_not), count in ordered]
        return ", ".join(results + [f"{tensors - noisy} of {tensors} tensors"] * (noisy > 0)) or None

    @property
    def passes(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {"target": key.target, **run}
            for key, run in self.recorder.pass_runs
            if key.phase == self.phase and self.candidate in (None, key.candidate)
        )

    @property
    def event_data(self) -> tuple[dict[str, Any], ...]:
        events = self.recorder.events if self.with_details else ()
        return tuple(event.to_dict() for event in events if event.phase == self.phase)

    # ------------------------------------------------------------------------------------------ times and memory

    @cached_property
    def times(self) -> StepTimes:
        return self.timer.times(self.phase, self.candidate)

    @cached_property
    def steps(self) -> Counter[StepKind]:
        return self.timer.steps(self.phase, self.candidate)

    @property
    def eager_calls(self) -> dict[str, int]:
        calls: Counter[str] = Counter()
        for key, number in self.recorder.executions.eager_calls.items():
            if key.phase == self.phase and self.candidate in (None, key.candidate):
                calls[key.target] += number
        return dict(calls)

    @property
    def samples(self) -> tuple[int, int] | None:
        samples = len(self.times.eager_ms), len(self.times.compiled_ms)
        return samples if any(samples) else None

    @property
    def eager_ms(self) -> float | None:
        return median_ms(self.times.eager_ms)

    @property
    def compiled_ms(self) -> float | None:
        return median_ms(self.times.compiled_ms)

    @property
    def compile_seconds(self) -> float | None:
        compiles = self.recorder.events_of(self.phase, "compile")
        return sum(event.seconds or 0 for event in compiles) if compiles else None

    @cached_property
    def savings(self) -> Savings | None:
        if self.compile_seconds is None:
            return None
        compiles = [event for event in self.recorder.events if event.kind == "compile"]
        outside_steps = self.recorder.import_seconds if compiles[0].phase == self.phase else 0.0
        outside_steps += sum(e.seconds or 0 for e in compiles if e.phase == self.phase and e.step is None)
        return savings(self.timer, self.phase, self.candidate, outside_steps)

    @property
    def waiting_steps(self) -> int:
        return self.timer.steps(self.phase, WAITING_VARIANT.name).total()

    @property
    def _was_not_called(self) -> bool:
        """Whether no step has called compiled code that was loaded."""
        was_loaded = self.seconds("compile", "load") is not None
        return was_loaded and not (self.steps["compiled"] or self.events("verify") or self.events("fallback"))

    @property
    def waiting_ms(self) -> float | None:
        windows = self.timer.windows(self.phase, WAITING_VARIANT.name, "eager")
        waiting = [window for workload, of in windows.items() if workload == self.times.workload for window in of]
        return median_ms([ms for window in waiting for ms in window])

    @property
    def net_seconds(self) -> float | None:
        return self.savings.net_seconds if self.savings else None

    @property
    def break_even_steps(self) -> float | None:
        return self.savings.break_even_steps if self.savings and self.speedup else None

    @cached_property
    def verdict(self) -> Verdict | None:
        if self._config is not None and 2 * self.steps["eager"] > self.steps.total():
            return "still compiling" if self.waits or self._was_not_called else "not compiled"
        comparison = self.times.comparison
        if comparison is None:
            return "too few samples" if self._config is not None and self.steps.total() else None
        outcome = comparison.outcome
        unpaid = outcome == "faster" and self.net_seconds is not None and self.net_seconds <= 0
        return "compile time not repaid" if unpaid else outcome

    @property
    def speedup(self) -> float | None:
        differ = self.verdict in ("faster", "slower", "compile time not repaid")
        return self.eager_ms / self.compiled_ms if differ and self.eager_ms and self.compiled_ms else None

    @property
    def series(self) -> tuple[dict[str, Any], ...]:
        return self.timer.series(self.phase) if self.with_details else ()
