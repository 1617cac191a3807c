"""What was measured: `CompileReport` and, for each phase, `PhaseReport`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from compile_callbacks.compiling.targets import Compiled
from compile_callbacks.measuring.events import CompileEvent, CompileRecorder, EventKind
from compile_callbacks.measuring.memory import PeakMemory
from compile_callbacks.measuring.timing import StepTimer, StepTimes, median_ms, spread_ms
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.reporting.table import labels_and_cells, plain_table
from compile_callbacks.settings.mode import EAGER
from compile_callbacks.settings.tune import Settings, Tune
from compile_callbacks.tuning.trial import Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """What compiling one phase cost and gained. What was not measured is ``None``.

    Attributes:
        mode: The settings, in a line; ``"eager"`` where the phase is not compiled. Of a `Tune`, what was chosen; the
            other figures are of that too, unless something else is said.
        targets: Names of the targets; repeated blocks with how many they are, and how many graphs they share.
        compile_seconds: Time spent compiling so far, forward, backward and CUDA-graph recording; of a `Tune`, all
            candidates together.
        graphs: Graphs compiled.
        graph_breaks: Places where torch ended a graph early.
        recompiles: Compiles because a guard of an earlier one failed.
        cache_hits: Graphs that came out of torch's cache on disk.
        cache_misses: Graphs that did not.
        eager_step_ms: Median of the eager baseline's steps, in milliseconds.
        eager_spread_ms: Interquartile range of the same.
        compiled_step_ms: Median of compiled steps of the same work, in milliseconds.
        compiled_spread_ms: Interquartile range of the same.
        speedup: ``eager_step_ms / compiled_step_ms``.
        samples: Steps behind the speedup: the smaller of the two sides' counts. Without a baseline, the
            compiled steps behind ``compiled_step_ms``.
        break_even_steps: Steps after which the time saved has paid for compiling; infinite where compiled
            steps are not faster.
        seconds_saved: Time that the compiled steps so far took less than eager ones would have, compile time
            not taken off; negative where they took more.
        eager_peak_memory_mb: Peak GPU memory of an eager step, in MiB; see `PeakMemory`.
        peak_memory_mb: Peak GPU memory of a compiled step, in MiB.
        folded_mb: Memory that weights take which are kept as inference graphs read them, in MiB (``fold_weights``).
        weight_refreshes: Times that they were computed anew because the weights had changed, or might have.
        max_abs_error: Largest absolute difference from eager of an output's element, on the first batch.
        verified: ``"equal"``, ``"differs"`` or ``"left out"`` (why: ``events``); ``None`` where not compared.
        fallbacks: Times that the compiler failed and the work was done eagerly.
        skipped_passes: Times that a custom graph pass failed and a graph was compiled without it (why: ``events``).
        passes: What custom graph passes did, a mapping for each pass and graph, in order: ``target``, ``name``,
            ``hook``, and either the fields of `PassRun` or, where the graph came out of torch's cache as the pass had
            left it, ``from_cache``.
        trials: What came of each candidate of a `Tune`, eager first, a mapping of the fields of `Trial` for each.
        processes: How many processes ran the phase together. Of more than one, ``compile_seconds`` and what is said of
            step times are those of the slowest process; memory and counts are those of the first.
        slowest_rank: The process whose step times these are; ``None`` where there was one, or none was measured.
        series: Step times in the order of the run, see `StepTimer.series`.
        comparison: ``"by size"`` where shapes vary, and step times are given as for a batch of the usual size; ``"by
            size, of new shapes"`` where they are of steps whose shapes no step before had.
        restored: Names of the figures that come from the run that this one resumes.
        advice: What the figures, and those of earlier runs with the same ``cache_dir``, say about other settings.
        events: What is behind the counts, in order.
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
    samples: int | None = None
    break_even_steps: float | None = None
    seconds_saved: float | None = None
    eager_peak_memory_mb: float | None = None
    peak_memory_mb: float | None = None
    folded_mb: float | None = None
    weight_refreshes: int | None = None
    max_abs_error: float | None = None
    verified: str | None = None
    fallbacks: int = 0
    skipped_passes: int = 0
    passes: tuple[dict[str, Any], ...] = ()
    trials: tuple[dict[str, Any], ...] = ()
    processes: int = 1
    slowest_rank: int | None = None
    series: tuple[dict[str, Any], ...] = ()
    comparison: str | None = None
    restored: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    events: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; an infinite ``break_even_steps`` is ``"never"``."""
        data = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.break_even_steps is not None and math.isinf(self.break_even_steps):
            data["break_even_steps"] = "never"
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PhaseReport:
        """The report that `to_dict` made ``data`` of; fields of other versions are left out."""
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {name: data[name] for name in known & data.keys()}
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        if values.get("break_even_steps") == "never":
            values["break_even_steps"] = math.inf
        return cls(**values)

    def scalars(self, phase: Phase) -> dict[str, float]:
        """What was measured, under the names that loggers get."""
        if self.compile_seconds is None:
            return {}
        values: dict[str, float | None] = {
            f"compile/{phase}/seconds": self.compile_seconds,
            f"compile/{phase}/graphs": self.graphs,
            f"compile/{phase}/graph_breaks": self.graph_breaks,
            f"compile/{phase}/recompiles": self.recompiles,
            f"compile/{phase}/cache_hits": self.cache_hits,
            f"step/{phase}/eager_ms": self.eager_step_ms,
            f"step/{phase}/compiled_ms": self.compiled_step_ms,
            f"step/{phase}/speedup": self.speedup,
            f"step/{phase}/break_even_steps": self.break_even_steps,
        }
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What compiling cost and gained in a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
        artifacts: Compile artifacts that outlast the run (``cache_dir``): ``path`` of the file, ``loaded_mb`` that were
            in it and ``saved_mb`` that are, in MiB; ``None`` without a ``cache_dir``.
        before: The report of the run that this one resumes, if it does.
    """

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)
    artifacts: dict[str, Any] | None = None
    before: CompileReport | None = None

    def phase(self, phase: Phase) -> PhaseReport:
        """The report of a phase by its name."""
        return self.train if phase == "train" else self.infer

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        data: dict[str, Any] = {phase: self.phase(phase).to_dict() for phase in PHASES}
        data["artifacts"] = self.artifacts
        data["before"] = self.before.to_dict() if self.before else None
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CompileReport:
        """The report that `to_dict` made ``data`` of."""
        before = data.get("before")
        return cls(
            train=PhaseReport.from_dict(data["train"]),
            infer=PhaseReport.from_dict(data["infer"]),
            artifacts=data.get("artifacts"),
            before=cls.from_dict(before) if before else None,
        )

    def scalars(self) -> dict[str, float]:
        """What was measured in both phases, under the names that loggers get."""
        return {name: value for phase in PHASES for name, value in self.phase(phase).scalars(phase).items()}

    def plot(self) -> Figure:
        """Step times over the steps of the run as a matplotlib figure, a panel for each phase.

        Eager and compiled steps have a colour each, steps in which something compiled are marked, and the legend has
        the medians and the step at which compiling has paid for itself. ``figure.savefig("steps.png")`` writes it.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: No step was timed yet.
        """
        from compile_callbacks.reporting.report_plot import plot_report  # matplotlib, for those alone who draw

        return plot_report(self)

    def __str__(self) -> str:
        """A table of plain text, a row for each figure and a column for each phase."""
        table = plain_table([("", *PHASES)], labels_and_cells([self.phase(phase) for phase in PHASES]))
        return "\n".join([table, *self.notes()])

    def notes(self) -> list[str]:
        """What the table has no room for, a line each."""
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
            if (comparison := self.phase(phase).comparison) is not None:
                notes.append(f"{phase}: hardly two batches have the same shapes; {_COMPARISON_NOTES[comparison]}")
        notes += [f"{phase}: {line}" for phase in PHASES for line in self.phase(phase).advice]
        if (processes := max(self.train.processes, self.infer.processes)) > 1:
            notes.append(f"{processes} processes: compile seconds and step times are those of the slowest")
        if self.artifacts is not None:
            loaded, saved = self.artifacts["loaded_mb"], self.artifacts["saved_mb"]
            notes.append(f"compile artifacts: {loaded:.1f} MB loaded, {saved:.1f} MB saved, {self.artifacts['path']}")
        return notes

    @property
    def has_figures(self) -> bool:
        """Whether anything was compiled, or could have been and was found not to be worth it."""
        return bool(self.scalars()) or any(t["verdict"] != "undecided" for p in PHASES for t in self.phase(p).trials)


_BY_SIZE, _OF_NEW_SHAPES = "by size", "by size, of new shapes"
_COMPARISON_NOTES = {
    _BY_SIZE: "step times are as for the usual size",
    _OF_NEW_SHAPES: "step times are as for the usual size, of steps whose shapes were new, which may take longer",
}

_VERDICT_NOTES = {
    "failed": "failed",
    "wrong": "is wrong",
    "not judged": "could not be judged",
    "not tried": "was not tried",
    "chosen": "is chosen",
}


def build_phase_report(
    phase: Phase,
    settings: Settings,
    targets: Sequence[Compiled],
    recorder: CompileRecorder,
    timer: StepTimer,
    memory: PeakMemory,
    *,
    trials: Sequence[Trial] = (),
) -> PhaseReport:
    """Put together what the recorder, the timer and the memory know of a phase."""
    chosen = next((trial.candidate for trial in trials if trial.verdict == "chosen"), None)
    config = None if chosen == EAGER else settings
    of_tune = chosen if isinstance(settings, Tune) else None

    def of(kind: EventKind) -> list[CompileEvent]:
        return [e for e in recorder.of(phase, kind) if of_tune is None or e.settings in (None, of_tune)]

    compiles = recorder.of(phase, "compile")
    times = timer.times(phase, of_tune)
    eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
    seconds = sum(event.seconds or 0 for event in compiles) if compiles else None
    folded_mb = [event.folded_mb for event in of("fold") if event.folded_mb is not None]
    graphs: Counter[str] = Counter()
    for event in of("compile"):
        graphs[event.target] += event.graphs
    counts = [len(side) for side in (times.eager_ms, times.compiled_ms) if side]
    return PhaseReport(
        mode=chosen or (config.describe() if config else EAGER),
        targets=tuple(target.described(graphs[target.name]) for target in targets) if config else (),
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
        speedup=eager_ms / compiled_ms if eager_ms is not None and compiled_ms else None,
        samples=min(counts) if counts else None,
        break_even_steps=break_even_steps(seconds, eager_ms, compiled_ms),
        seconds_saved=seconds_saved(
            timer.steps_to_judge(phase, of_tune), eager_ms, compiled_ms, timer.saved_before_seconds(phase)
        ),
        eager_peak_memory_mb=memory.peak_mb(phase, compiled=False),
        peak_memory_mb=memory.peak_mb(phase, compiled=True, settings=of_tune),
        folded_mb=sum(folded_mb) if folded_mb else None,
        weight_refreshes=recorder.weight_refreshes[phase] if folded_mb else None,
        max_abs_error=max((e.max_abs_error for e in of("verify") if e.max_abs_error is not None), default=None),
        verified=_verdict(of("verify")),
        fallbacks=len(of("fallback")),
        skipped_passes=len(of("pass_skipped")),
        trials=tuple(trial.to_dict() for trial in trials),
        passes=tuple(
            {"target": owner.target, **run}
            for owner, run in recorder.pass_runs
            if owner.phase == phase and (of_tune is None or owner.settings == of_tune)
        ),
        series=timer.series(phase),
        comparison=_comparison(times),
        restored=("eager_step_ms", "eager_spread_ms") if times.restored else (),
        events=tuple(event.to_dict() for event in recorder.events if event.phase == phase),
    )


def _comparison(times: StepTimes) -> str | None:
    """How eager and compiled steps are compared, where it is not by equal work."""
    if not times.by_size or times.work is None:
        return None
    return _OF_NEW_SHAPES if times.work.new else _BY_SIZE


def _verdict(comparisons: Sequence[CompileEvent]) -> str | None:
    """What came of a phase's comparisons with eager, the worst first."""
    if any(event.reason and event.max_abs_error is not None for event in comparisons):
        return "differs"
    if any(event.reason for event in comparisons):
        return "left out"
    return "equal" if comparisons else None


def uncompiled_report(configs: Mapping[Phase, Settings]) -> CompileReport:
    """The report of settings with which nothing has run yet."""
    phases = {phase: PhaseReport(mode=config.describe() if config else EAGER) for phase, config in configs.items()}
    return CompileReport(train=phases["train"], infer=phases["infer"])


def seconds_saved(
    steps: int, eager_ms: float | None, compiled_ms: float | None, before: float | None = None
) -> float | None:
    """What so many compiled steps took less than eager ones would have, and others before them."""
    if eager_ms is None or compiled_ms is None:
        return before
    return (before or 0.0) + (eager_ms - compiled_ms) * steps / 1000


def break_even_steps(compile_seconds: float | None, eager_ms: float | None, compiled_ms: float | None) -> float | None:
    """Steps after which the time saved has paid for compiling: seconds spent over seconds saved a step.

    Infinite where compiled steps are not faster, ``None`` where one of the three was not measured.
    """
    if compile_seconds is None or eager_ms is None or compiled_ms is None:
        return None
    saved_ms = eager_ms - compiled_ms
    return compile_seconds * 1000 / saved_ms if saved_ms > 0 else math.inf
