"""The data of reports: a `RunReport` has a `PhaseReport` for each phase. `figures.figure` declares each figure.

The strings below the figures are Markdown, because docs/reference/report.md shows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.profiling.comparison import spread_ms
from compile_callbacks.profiling.events import Verdict
from compile_callbacks.report.figures import COUNT, NOTHING, Data, Figures, cell, count, figure

FILE_NAME = "compile_report.json"
VERSION = 1
"""The version of the records in the file. See `report.file`."""

_MAX_NAMES = 4


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more or NOTHING


def _step(side: str, report: PhaseReport) -> str:
    median, spread = getattr(report, f"{side}_step_ms"), getattr(report.diagnostics, f"{side}_spread_ms")
    return cell(median, "{:.2f}") + ("" if spread is None else f" ± {spread / 2:.2f}")


def _peak(prefix: str, details: PhaseDiagnostics) -> str:
    mib = getattr(details, f"{prefix}peak_memory_mib")
    return cell(getattr(details, f"{prefix}peak_memory_at_most_mib") if mib is None else mib, "{:.0f}")


def _samples(report: PhaseReport) -> str:
    eager, compiled = report.diagnostics.eager_samples, report.diagnostics.compiled_samples
    return NOTHING if eager is None or compiled is None else f"{eager} / {compiled}"


def _cache(report: PhaseReport) -> str:
    hits, misses = report.cache_hits, report.diagnostics.cache_misses
    return f"{hits} / {misses}" if hits or misses else NOTHING


def _passes(details: PhaseDiagnostics) -> str:
    lines = []
    for name in dict.fromkeys(run["name"] for run in details.passes):
        runs = [run for run in details.passes if run["name"] == name]
        changed = [run["changed"] for run in runs if "changed" in run]
        ran = f"{sum(changed)} of {len(changed)} graphs changed" if changed else "did not run"
        cached = len(runs) - len(changed)
        lines.append(f"{name}: {ran}" + (f", {cached} from the cache" if cached else ""))
    return "\n".join(lines) or NOTHING


@dataclass(frozen=True, kw_only=True)
class PhaseDiagnostics(Figures):
    """The details of a `PhaseReport`. A figure that was not measured is ``None``."""

    cache_misses: int = figure(lambda facts: sum(facts.values("cache_misses")), default=0)
    """Number of graphs that were not in torch's cache on disk."""
    eager_samples: int | None = figure(lambda facts: facts.samples and facts.samples[0])
    """Number of eager samples."""
    compiled_samples: int | None = figure(lambda facts: facts.samples and facts.samples[1])
    """Number of compiled samples."""
    eager_spread_ms: float | None = figure(lambda facts: spread_ms(facts.times.eager_ms))
    """Interquartile range of the eager step times, in milliseconds."""
    compiled_spread_ms: float | None = figure(lambda facts: spread_ms(facts.times.compiled_ms))
    """Interquartile range of the compiled step times, in milliseconds."""
    speedup_interval: tuple[float, ...] = figure(
        lambda facts: facts.times.comparison[1:] if facts.times.comparison else (), default=()
    )
    """The two ends of the 95% confidence interval of `eager_step_ms / compiled_step_ms`. Empty for too few samples."""
    eager_peak_memory_mib: float | None = figure(
        lambda facts: facts.memory.peak(facts.phase, EAGER).mib, "speed", partial(_peak, "eager_")
    )
    """Peak GPU memory of an eager step, in MiB, with weights and optimizer state. If these steps did not raise the peak
    of the process, the row shows the peak of the process."""
    eager_peak_memory_at_most_mib: float | None = figure(
        lambda facts: facts.memory.peak(facts.phase, EAGER).at_most_mib
    )
    """An upper bound of this peak if eager steps did not raise the peak of the process."""
    peak_memory_mib: float | None = figure(
        lambda facts: facts.memory.peak(facts.phase, facts.candidate).mib,
        "speed",
        partial(_peak, ""),
        row="compiled peak memory MiB",
        scalar="step/PHASE/peak_memory_mib",
        limit="most",
    )
    """Peak GPU memory of a compiled step, in MiB."""
    peak_memory_at_most_mib: float | None = figure(
        lambda facts: facts.memory.peak(facts.phase, facts.candidate).at_most_mib
    )
    """An upper bound of this peak if compiled steps did not raise the peak of the process."""
    load_seconds: float | None = figure(lambda facts: facts.seconds("compile", "load"))
    """The share of `compile_seconds` that loaded code of the helper process. The rest captured the graphs."""
    waiting_steps: int = figure(lambda facts: facts.waiting_steps, "compile", COUNT, default=0, row="steps meanwhile")
    """Number of steps that ran eagerly while the helper process compiled."""
    waiting_step_ms: float | None = figure(lambda facts: facts.waiting_ms, "speed", "{:.2f}", row="step meanwhile ms")
    """Median time of these steps, in milliseconds. The helper process may slow them. `net_seconds_saved` contains the
    difference from `eager_step_ms`."""
    saved_for_backward_mib: float | None = figure(
        lambda facts: facts.saved_mib,
        "speed",
        lambda details: cell(round(details.saved_for_backward_mib or 0, 1) or None, "{:.1f}"),
    )
    """Memory of the activations that graphs save for their backward pass, in MiB. Each target counts with the graph
    that saves the most. Graphs from torch's cache do not count."""
    max_abs_error: float | None = figure(
        lambda facts: max(facts.values("max_abs_error"), default=None), "correctness", "{:.1e}"
    )
    """Largest absolute difference from eager in any output element, at the first call of each graph. Rounding alone
    causes small differences; verification compares [relative to the size of the tensor](limits.md#verification)."""
    skipped_passes: int = count("pass_skipped")
    """Number of graphs that were compiled without a custom graph pass because the pass failed."""
    passes: tuple[dict[str, Any], ...] = figure(
        lambda facts: facts.passes, "compile", _passes, row="graph passes", default=()
    )
    """One mapping for each graph and custom graph pass, in order: `target`, `name`, `hook`, and the fields of
    `PassRun`, or `from_cache` if the graph was loaded from torch's cache."""
    steps: dict[str, int] = figure(lambda facts: dict(facts.steps), default=dict)
    """Number of steps with the settings of the phase, by kind: `compiled` (a compiled graph ran) and `eager`."""
    eager_calls: dict[str, int] = figure(lambda facts: facts.eager_calls, default=dict)
    """Number of calls by target that ran eagerly, or of which a part did, in steps with the settings of the phase."""
    trials: tuple[dict[str, Any], ...] = figure(lambda facts: facts.trials if facts.with_details else (), default=())
    """One mapping for each candidate of a `Tune`, eager first: `candidate`, `verdict`, `median_ms` and `p95_ms`
    (median and 95th percentile of the step times), `samples`, `compile_seconds`, `reason`. Each candidate has a row of
    the table."""
    series: tuple[dict[str, Any], ...] = figure(lambda facts: facts.series, default=())
    """Step times in order, as one mapping for each `kind` of step (`eager`, `compiled` or `compiling`) and
    `candidate`: `steps` contains numbers of steps in the phase, and `ms` contains their times. A long run keeps
    windows of ten steps, spread evenly over the run."""
    restored: tuple[str, ...] = figure(lambda facts: (), default=())
    """Always empty, because a run measures all of its figures itself."""
    events: tuple[dict[str, Any], ...] = figure(lambda facts: facts.event_data, default=())
    """The events of the phase in order, such as each graph break and each recompile with its reason. See
    `CompileEvent`."""


@dataclass(frozen=True, kw_only=True)
class PhaseReport(Figures):
    """The cost and the gain of compiling one phase. A figure that was not measured is ``None``.

    A *sample* is the time of one step. docs/reference/report.md describes the fields.
    """

    mode: str = figure(lambda facts: facts.mode, "compile", default=EAGER)
    """The settings in one line, or `eager` if the phase is not compiled. With a `Tune`, the chosen candidate. The other
    figures are about that candidate, unless their description says otherwise."""
    targets: tuple[str, ...] = figure(
        lambda facts: facts.targets, "compile", lambda report: _listed(report.targets), default=()
    )
    """Names of the compiled targets. Repeated blocks also have the number of blocks and of shared graphs."""
    verdict: Verdict | None = figure(lambda facts: facts.verdict)
    """The result of the comparison with eager steps, see [Verdict](#verdict). `None`: the settings leave the phase
    eager, or only its eager steps have run."""
    compile_seconds: float | None = figure(
        lambda facts: facts.compile_seconds, "compile", "{:.1f}", scalar="compile/PHASE/seconds", limit="most"
    )
    """Seconds in which torch traced the code, compiled forward and backward graphs, and recorded CUDA graphs. With a
    `Tune`, the sum over all candidates. Does not include verification and compiles of your own functions."""
    background_seconds: float | None = figure(
        lambda facts: facts.seconds("background"), "compile", "{:.1f}", row="compiled in the background s"
    )
    """Seconds in which the helper process of `background=True` compiled, while training went on."""
    graphs: int = figure(
        lambda facts: sum(facts.values("graphs")), "compile", COUNT, default=0, scalar="compile/PHASE/graphs"
    )
    """Number of compiled graphs."""
    graph_breaks: int = count("graph_break", scalar="compile/PHASE/graph_breaks", zero=True)
    """Number of graph breaks."""
    recompiles: int = count("recompile", scalar="compile/PHASE/recompiles", zero=True)
    """Number of compiles that a failed guard caused."""
    fallbacks: int = count("fallback", zero=True)
    """Number of compiler failures after which a target or a graph ran eagerly."""
    cache_hits: int = figure(
        lambda facts: sum(facts.values("cache_hits")),
        "compile",
        _cache,
        default=0,
        row="cache hits / misses",
        scalar="compile/PHASE/cache_hits",
    )
    """Number of graphs that were loaded from torch's cache on disk."""
    verified: str | None = figure(lambda facts: facts.comparisons, "correctness", row="compared with eager")
    """The number of graphs by result of the [comparison with eager](limits.md#verification), such as `equal 12, not
    compared 2 (dropout)`. `outputs only` means that gradients were not compared, and `58 of 62 tensors` that rounding
    alone decides the others. Graphs that draw random numbers, as dropout does, are not compared;
    `{"options": {"fallback_random": True}}` as the mode makes them comparable, but slower. `None` if no graph was
    compared."""
    eager_step_ms: float | None = figure(
        lambda facts: facts.eager_ms, "speed", partial(_step, "eager"), scalar="step/PHASE/eager_ms"
    )
    """Median time of the eager baseline steps, in milliseconds. The row also shows ± half of the interquartile range:
    the middle half of the samples lies in a range of twice this width. ± is the spread of single steps, not the error
    of the median, and needs four samples."""
    compiled_step_ms: float | None = figure(
        lambda facts: facts.compiled_ms, "speed", partial(_step, "compiled"), scalar="step/PHASE/compiled_ms"
    )
    """Median time of the compiled steps of the same workload, in milliseconds, and ± as above."""
    samples: int | None = figure(
        lambda facts: facts.samples and min(filter(None, facts.samples)),
        "speed",
        _samples,
        row="samples, eager / compiled",
    )
    """The number of eager samples or of compiled samples, whichever is smaller. Without a baseline, the number of
    compiled samples."""
    speedup: float | None = figure(
        lambda facts: facts.speedup, "speed", "{:.2f}x", scalar="step/PHASE/speedup", limit="least"
    )
    """`eager_step_ms / compiled_step_ms`. `None` if there are fewer than five eager or five compiled samples, if the
    [95% confidence interval](#confidence-interval) of the ratio contains 1 or is too wide to help, or if the medians
    differ by more than 20 times."""
    net_seconds_saved: float | None = figure(
        lambda facts: facts.savings and facts.savings.net_seconds,
        "speed",
        "{:.1f}",
        scalar="step/PHASE/net_seconds_saved",
    )
    """The seconds that all steps since the baseline saved. Each compiled step saves the share of its time by which the
    two medians differ. Steps of a stage without eager steps save nothing. A step that compiles counts with its whole
    time, including verification. The import of the compiler, about a second, counts in the phase that compiles first.
    `None` if the baseline of the workload has fewer than five samples, or if the verdict is `not comparable`."""
    break_even_steps: float | None = figure(
        lambda facts: facts.break_even_steps,
        "speed",
        "{:.0f}",
        row="break-even steps",
        scalar="step/PHASE/break_even_steps",
    )
    """Number of compiled steps after which `net_seconds_saved` is positive. Infinite if compiled steps are slower, and
    `None` without a speedup. [Not the quotient](#break-even-steps) of compile time and median saving."""
    diagnostics: PhaseDiagnostics = figure(PhaseDiagnostics.of, default=PhaseDiagnostics)
    """The [details](#details-of-a-phase)."""

    def scalars(self, phase: Phase) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        if self.compile_seconds is None:
            return {}
        return super().scalars(phase) | self.diagnostics.scalars(phase)


@dataclass(frozen=True, kw_only=True)
class RunReport(Data):
    """The data of a `CompileReport`."""

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)

    def phase(self, phase: Phase) -> PhaseReport:
        """Return the report of a phase by its name."""
        return self.train if phase == "train" else self.infer

    def scalars(self) -> dict[str, float]:
        """Return the figures of both phases by the names of the logged scalars."""
        return self.train.scalars("train") | self.infer.scalars("infer")

    @property
    def compiled_phases(self) -> tuple[Phase, ...]:
        """The phases that have figures to show, or both phases if neither has."""
        compiled = [p for p in PHASES if self.phase(p).mode != EAGER or self.phase(p).diagnostics.trials]
        return tuple(compiled) or PHASES

    @property
    def has_figures(self) -> bool:
        """Whether a phase has a verdict, or a `Tune` has a verdict on a candidate."""
        phases = [self.phase(phase) for phase in PHASES]
        trials = [trial for phase in phases for trial in phase.diagnostics.trials]
        verdicts = any(phase.verdict for phase in phases) or any(trial["verdict"] != "undecided" for trial in trials)
        return verdicts or bool(self.scalars())
