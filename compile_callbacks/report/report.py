"""The report: `CompileReport`, and `PhaseReport` for each phase."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.config.mode import EAGER, USER
from compile_callbacks.config.tune import Settings, Tune
from compile_callbacks.profiling.compile_events import CompileEvent, CompileRecorder, EventKind
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.step_stats import SAMPLES_FOR_SPEEDUP, speedup_interval
from compile_callbacks.profiling.step_timer import StepTimer, StepTimes, median_ms, spread_ms
from compile_callbacks.report.console import report_table, to_text
from compile_callbacks.tuning.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class _Target(Protocol):
    @property
    def name(self) -> str: ...

    def label(self, graphs: int) -> str: ...


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """Compile time, step times and counts of one phase. A figure that was not measured is ``None``.

    Attributes:
        mode: The settings in one line; ``"eager"`` if the phase is not compiled. For a `Tune`, the chosen candidate,
            and the other figures are of that candidate unless they say otherwise.
        targets: Names of the compiled targets; for repeated blocks, with the number of blocks and of shared graphs.
        compile_seconds: Seconds spent on compiling so far: forward, backward and CUDA graph recording. For a `Tune`,
            the sum over all candidates.
        graphs: Number of compiled graphs.
        graph_breaks: Number of graph breaks.
        recompiles: Number of compiles caused by a failed guard.
        cache_hits: Graphs that were loaded from torch's cache on disk.
        cache_misses: Graphs that were not in that cache.
        eager_step_ms: Median of the eager baseline steps, in milliseconds.
        eager_spread_ms: Interquartile range of the eager baseline steps.
        compiled_step_ms: Median of the compiled steps of the same workload, in milliseconds.
        compiled_spread_ms: Interquartile range of these compiled steps.
        speedup: ``eager_step_ms / compiled_step_ms``, if there are at least 5 samples of each and the 95% interval of
            the ratio excludes 1.0; else ``None``.
        no_speedup: Why ``speedup`` is ``None`` although compiled steps were timed: ``"no eager samples"``,
            ``"too few samples"`` or ``"no difference"``.
        samples: The smaller one of the two sample counts. Without a baseline, the number of compiled samples.
        break_even_steps: Number of steps after which the saved time exceeds ``compile_seconds``; infinite if
            compiled steps are slower, ``None`` without a speedup.
        seconds_saved: Time that the compiled steps so far saved, without subtracting ``compile_seconds``; negative if
            compiled steps are slower, ``None`` without a speedup.
        eager_peak_memory_mib: Peak GPU memory of an eager step, in MiB; see `PeakMemory`.
        eager_peak_memory_at_most_mib: The same as an upper bound: eager steps did not raise the peak of the process.
        peak_memory_mib: Peak GPU memory of a compiled step, in MiB.
        peak_memory_at_most_mib: The same as an upper bound.
        folded_mib: Memory of the folded copies of weights (``fold_weights``), in MiB.
        weight_refreshes: How often these copies were recomputed because the weights changed, or might have changed.
        max_abs_error: Largest absolute error of an output's element, compared with eager at each graph's first call.
        verified: The result of these comparisons, the worst of all graphs: ``"equal"``, ``"outputs only"`` (gradients
            were not compared), ``"not compared"`` or ``"differs"`` (why: ``events``); ``None`` if there were none.
        comparisons: The number of graphs by result, such as ``{"equal": 12, "not compared (dropout)": 2}``.
        fallbacks: Number of compiler failures after which the work ran eagerly.
        skipped_passes: Number of graphs that were compiled without a custom graph pass because the pass failed.
        passes: One mapping for each graph and custom graph pass, in order: ``target``, ``name``, ``hook``, and the
            fields of `PassRun`, or ``from_cache`` if the graph was loaded from torch's cache.
        trials: One mapping with the fields of `Trial` for each candidate of a `Tune`, eager first.
        series: Step times in order, see `StepTimer.series`.
        restored: Names of the figures that were loaded from the checkpoint of an earlier run.
        events: The events behind the counts, in order.
    """

    mode: str = EAGER
    targets: tuple[str, ...] = ()
    compile_seconds: float | None = None
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    eager_step_ms: float | None = None
    eager_spread_ms: float | None = None
    compiled_step_ms: float | None = None
    compiled_spread_ms: float | None = None
    speedup: float | None = None
    no_speedup: str | None = None
    samples: int | None = None
    break_even_steps: float | None = None
    seconds_saved: float | None = None
    eager_peak_memory_mib: float | None = None
    eager_peak_memory_at_most_mib: float | None = None
    peak_memory_mib: float | None = None
    peak_memory_at_most_mib: float | None = None
    folded_mib: float | None = None
    weight_refreshes: int | None = None
    max_abs_error: float | None = None
    verified: str | None = None
    comparisons: dict[str, int] = field(default_factory=dict)
    fallbacks: int = 0
    skipped_passes: int = 0
    passes: tuple[dict[str, Any], ...] = ()
    trials: tuple[dict[str, Any], ...] = ()
    series: tuple[dict[str, Any], ...] = ()
    restored: tuple[str, ...] = ()
    events: tuple[dict[str, Any], ...] = ()

    def describe_comparisons(self) -> str:
        """The comparisons with eager in a line, such as ``equal 12, not compared 2 (dropout)``."""
        counts = ((*result.partition(" ("), count) for result, count in self.comparisons.items())
        return ", ".join(f"{verdict} {count}{opening}{reason}" for verdict, opening, reason, count in counts)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; an infinite ``break_even_steps`` is ``"never"``."""
        data = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.break_even_steps is not None and math.isinf(self.break_even_steps):
            data["break_even_steps"] = "never"
        return data

    @classmethod
    def from_dict(cls, data: object) -> PhaseReport:
        """Rebuild a report from `to_dict`; a field that is missing, unknown or of a wrong type gets its default."""
        values = dict(data) if isinstance(data, Mapping) else {}
        if values.get("break_even_steps") == "never":
            values["break_even_steps"] = math.inf
        found: dict[str, Any] = {}
        for f in fields(cls):
            if f.name in values and _fits(value := values[f.name], str(f.type)):
                found[f.name] = tuple(value) if isinstance(value, list) else value
        return cls(**found)

    def scalars(self, phase: Phase, name: str = "") -> dict[str, float]:
        """The figures by the names that loggers get.

        Args:
            phase: The phase.
            name: The name of the callback, for all but the first one of a trainer.
        """
        if self.compile_seconds is None:
            return {}
        compile_ = f"compile/{phase}/{name}" if name else f"compile/{phase}"
        values: dict[str, float | None] = {
            f"{compile_}/seconds": self.compile_seconds,
            f"{compile_}/graphs": self.graphs,
            f"{compile_}/graph_breaks": self.graph_breaks,
            f"{compile_}/recompiles": self.recompiles,
            f"{compile_}/cache_hits": self.cache_hits,
            f"step/{phase}/eager_ms": self.eager_step_ms,
            f"step/{phase}/compiled_ms": self.compiled_step_ms,
            f"step/{phase}/speedup": self.speedup,
            f"step/{phase}/break_even_steps": self.break_even_steps,
        }
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The report of a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
        before: The report of the run that this run resumes; ``None`` if it resumes none.
    """

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)
    before: CompileReport | None = None

    def phase(self, phase: Phase) -> PhaseReport:
        """The report of a phase by its name."""
        return self.train if phase == "train" else self.infer

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        data: dict[str, Any] = {phase: self.phase(phase).to_dict() for phase in PHASES}
        data["before"] = self.before.to_dict() if self.before else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        """Rebuild a report from `to_dict`; a field that is missing, unknown or of a wrong type gets its default."""
        before = data.get("before")
        return cls(
            train=PhaseReport.from_dict(data.get("train")),
            infer=PhaseReport.from_dict(data.get("infer")),
            before=cls.from_dict(before) if isinstance(before, Mapping) else None,
        )

    def scalars(self, name: str = "") -> dict[str, float]:
        """The figures of both phases by the names that loggers get.

        Args:
            name: The name of the callback, for all but the first one of a trainer.
        """
        return self.train.scalars("train", name) | self.infer.scalars("infer", name)

    def plot(self) -> Figure:
        """Plot the step times as a matplotlib figure with one panel for each phase.

        Eager and compiled steps have different colors, steps that compiled are marked, and the legend shows the medians
        and the break-even step. ``figure.savefig("steps.png")`` writes the figure to a file.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: No step was timed yet.
        """
        from compile_callbacks.report.plot import plot_report  # imports matplotlib

        return plot_report(self)

    def __str__(self) -> str:
        """A plain-text table with a row for each figure and a column for each phase."""
        return "\n".join([to_text(report_table(self)), *self.notes()])

    def notes(self) -> list[str]:
        """Lines for below the table."""
        notes = [
            f"{phase}: {trial['candidate']} {_VERDICT_NOTES[trial['verdict']]}: {trial['reason']}"
            for phase in PHASES
            for trial in self.phase(phase).trials
            if trial["reason"] and trial["verdict"] in _VERDICT_NOTES
        ]
        for phase in PHASES:
            trials = self.phase(phase).trials
            if trials and all(trial["verdict"] != "chosen" for trial in trials):
                notes.append(
                    f"{phase}: nothing is chosen yet: that takes more steps of the phase, in this run or a longer one"
                )
            if self.phase(phase).restored:
                notes.append(f"{phase}: eager steps were measured in the run before this one")
        return notes

    @property
    def has_figures(self) -> bool:
        """Whether anything was compiled, or a `Tune` has a verdict on any candidate."""
        return bool(self.scalars()) or any(t["verdict"] != "undecided" for p in PHASES for t in self.phase(p).trials)


_VERDICT_NOTES = {
    "failed": "failed",
    "wrong": "is wrong",
    "not compared": "could not be compared",
    "not tried": "was not tried",
    "chosen": "is chosen",
}


def build_phase_report(
    phase: Phase,
    settings: Settings,
    targets: Sequence[_Target],
    recorder: CompileRecorder,
    timer: StepTimer,
    memory: PeakMemory,
    *,
    left_alone: bool = False,
    trials: Sequence[Trial] = (),
) -> PhaseReport:
    """Build the report of a phase from its events, step times and memory."""
    chosen = next((trial.candidate for trial in trials if trial.verdict == "chosen"), None)
    config = None if chosen == EAGER else settings
    of_tune = chosen if isinstance(settings, Tune) else None

    def of(kind: EventKind) -> list[CompileEvent]:
        return [e for e in recorder.events_of(phase, kind) if of_tune is None or e.candidate in (None, of_tune)]

    compiles = recorder.events_of(phase, "compile")
    graphs: Counter[str] = Counter()
    for event in of("compile"):
        graphs[event.target] += event.graphs
    times = timer.times(phase, of_tune)
    if not graphs.total():
        times = replace(times, compiled_ms=())  # the steps ran eagerly, whatever the settings
    eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
    no_speedup = why_no_speedup(times)
    # Break-even and saved time are claims about the same difference, so they need the same evidence.
    compared_ms = (eager_ms, compiled_ms) if no_speedup is None else (None, None)
    seconds = sum(event.seconds or 0 for event in compiles) if compiles else None
    folded_mib = [event.folded_mib for event in of("fold") if event.folded_mib is not None]
    counts = [len(side) for side in (times.eager_ms, times.compiled_ms) if side]
    eager_peak = memory.peak(phase, compiled=False)
    peak = memory.peak(phase, compiled=True, candidate=of_tune)
    return PhaseReport(
        mode=chosen or (config.describe() if config else USER if left_alone else EAGER),
        targets=tuple(target.label(graphs[target.name]) for target in targets) if config else (),
        compile_seconds=seconds,
        graphs=graphs.total(),
        graph_breaks=len(of("graph_break")),
        recompiles=len(of("recompile")),
        cache_hits=sum(event.cache_hits for event in of("cache")),
        cache_misses=sum(event.cache_misses for event in of("cache")),
        eager_step_ms=eager_ms,
        eager_spread_ms=spread_ms(times.eager_ms),
        compiled_step_ms=compiled_ms,
        compiled_spread_ms=spread_ms(times.compiled_ms),
        speedup=eager_ms / compiled_ms if no_speedup is None and eager_ms and compiled_ms else None,
        no_speedup=no_speedup,
        samples=min(counts) if counts else None,
        break_even_steps=break_even_steps(seconds, *compared_ms),
        seconds_saved=seconds_saved(timer.compiled_steps(phase, of_tune), *compared_ms),
        eager_peak_memory_mib=eager_peak.mib,
        eager_peak_memory_at_most_mib=eager_peak.at_most_mib,
        peak_memory_mib=peak.mib,
        peak_memory_at_most_mib=peak.at_most_mib,
        folded_mib=sum(folded_mib) if folded_mib else None,
        weight_refreshes=recorder.weight_refreshes[phase] if folded_mib else None,
        max_abs_error=max((e.max_abs_error for e in of("verify") if e.max_abs_error is not None), default=None),
        verified=_verdict(of("verify")),
        comparisons=_comparisons(of("verify")),
        fallbacks=len(of("fallback")),
        skipped_passes=len(of("pass_skipped")),
        trials=tuple(trial.to_dict() for trial in trials),
        passes=tuple(
            {"target": key.target, **run}
            for key, run in recorder.pass_runs
            if key.phase == phase and (of_tune is None or key.candidate == of_tune)
        ),
        series=timer.series(phase),
        restored=("eager_step_ms", "eager_spread_ms") if times.restored else (),
        events=tuple(event.to_dict() for event in recorder.events if event.phase == phase),
    )


def why_no_speedup(times: StepTimes) -> str | None:
    """The reason why the step times show no speedup; ``None`` if they show one, or if no compiled step was timed."""
    if not times.compiled_ms:
        return None
    if not times.eager_ms:
        return "no eager samples"
    if min(len(times.eager_ms), len(times.compiled_ms)) < SAMPLES_FOR_SPEEDUP:
        return "too few samples"
    low, high = speedup_interval(times.eager_ms, times.compiled_ms)
    return None if low > 1 or high < 1 else "no difference"


def _verdict(comparisons: Sequence[CompileEvent]) -> str | None:
    """The worst result of a phase's comparisons with eager."""
    found = {event.verdict for event in comparisons}
    return next((verdict for verdict in _VERDICTS if verdict in found), None)


_VERDICTS = ("differs", "not compared", "outputs only", "equal")


def _comparisons(comparisons: Sequence[CompileEvent]) -> dict[str, int]:
    """The number of compared graphs by result, and by the kind of reason for those that were not compared."""
    results: Counter[str] = Counter()
    for event in comparisons:
        why_not = f" ({(event.reason or '').partition(':')[0]})" if event.verdict == "not compared" else ""
        results[f"{event.verdict}{why_not}"] += 1
    return dict(results)


def _fits(value: object, annotation: str) -> bool:
    """Whether a value read from JSON has the type of a field of `PhaseReport`."""
    if annotation.startswith("tuple["):
        item = dict if "dict" in annotation else str
        return isinstance(value, list | tuple) and all(isinstance(part, item) for part in value)
    if annotation.startswith("dict["):
        return isinstance(value, dict) and all(isinstance(number, int) for number in value.values())
    if value is None or isinstance(value, bool):
        return value is None and annotation.endswith("| None")
    types: dict[str, Any] = {"str": str, "int": int, "float": int | float}
    return isinstance(value, types[annotation.removesuffix(" | None")])


def uncompiled_report(configs: Mapping[Phase, Settings], left_alone: frozenset[Phase] = frozenset()) -> CompileReport:
    """The report before anything ran."""
    modes = {phase: USER if phase in left_alone else EAGER for phase in configs}
    phases = {
        phase: PhaseReport(mode=config.describe() if config else modes[phase]) for phase, config in configs.items()
    }
    return CompileReport(train=phases["train"], infer=phases["infer"])


def seconds_saved(steps: int, eager_ms: float | None, compiled_ms: float | None) -> float | None:
    """The time that compiled steps took less than the same number of eager steps."""
    return None if eager_ms is None or compiled_ms is None else (eager_ms - compiled_ms) * steps / 1000


def break_even_steps(compile_seconds: float | None, eager_ms: float | None, compiled_ms: float | None) -> float | None:
    """Number of steps after which the saved time exceeds the compile time.

    Infinite if compiled steps are not faster, ``None`` if one of the three figures was not measured.
    """
    if compile_seconds is None or eager_ms is None or compiled_ms is None:
        return None
    saved_ms = eager_ms - compiled_ms
    return compile_seconds * 1000 / saved_ms if saved_ms > 0 else math.inf
