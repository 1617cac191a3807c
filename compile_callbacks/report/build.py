"""Builds a `PhaseReport` from compile events, step times and memory. `Session.report` calls this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.config.tune import PhaseConfig, Tune
from compile_callbacks.profiling.events import CompileEvent, EventKind
from compile_callbacks.profiling.memory import PeakMemory
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.profiling.saved_time import net_series
from compile_callbacks.profiling.step_stats import MIN_SAMPLES, median_ms, speedup_interval, spread_ms
from compile_callbacks.profiling.step_timer import StepTimer, StepTimes
from compile_callbacks.report.data import PhaseDiagnostics, PhaseReport, Verdict
from compile_callbacks.report.report import CompileReport

_RESULTS = ("differs", "equal", "outputs only", "not compared")


class _Target(Protocol):
    @property
    def name(self) -> str: ...

    def label(self, graphs: int) -> str: ...


def build_phase_report(
    phase: Phase,
    phase_config: PhaseConfig,
    targets: Sequence[_Target],
    recorder: CompileRecorder,
    timer: StepTimer,
    memory: PeakMemory,
    *,
    trials: Sequence[Mapping[str, Any]] = (),
    details: bool = True,
) -> PhaseReport:
    """Build the report of a phase."""
    chosen = next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None)
    config = None if chosen == EAGER else phase_config
    candidate = chosen if isinstance(phase_config, Tune) else None

    def of(kind: EventKind) -> list[CompileEvent]:
        events = recorder.events_of(phase, kind)
        return [event for event in events if candidate is None or event.candidate in (None, candidate)]

    compiles = recorder.events_of(phase, "compile")
    seconds = sum(event.seconds or 0 for event in compiles) if compiles else None
    graphs: Counter[str] = Counter()
    for event in of("compile"):
        graphs[event.target] += event.graphs
    times, steps = timer.times(phase, candidate), timer.steps(phase, candidate)
    eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
    outside = sum(event.seconds or 0 for event in compiles if event.step is None)
    if next((event.phase for event in recorder.events if event.kind == "compile"), None) == phase:
        outside += recorder.import_seconds
    savings = timer.savings(phase, outside) if compiles else None
    series = timer.series(phase) if details else ()
    verdict = compare(times) if details else None
    speedup = eager_ms / compiled_ms if verdict in ("faster", "slower") and eager_ms and compiled_ms else None
    if verdict == "faster" and savings is not None and savings.net_seconds <= 0:
        verdict = "compile time not repaid"
    if details and config is not None and steps["eager"] > steps["compiled"] + steps["partly compiled"]:
        verdict, speedup = "not compiled", None
    elif verdict is None and details and config is not None and steps.total():
        verdict = "too few samples"
    saved: dict[str, float] = {}
    for event in of("compile"):
        if event.saved_mib is not None:
            saved[event.target] = max(saved.get(event.target, 0.0), event.saved_mib)
    counts = [len(side) for side in (times.eager_ms, times.compiled_ms) if side]
    eager_peak, peak = memory.peak(phase, EAGER), memory.peak(phase, candidate)
    errors = [event.max_abs_error for event in of("verify") if event.max_abs_error is not None]
    return PhaseReport(
        mode=chosen or (config.describe() if config else EAGER),
        targets=tuple(target.label(graphs[target.name]) for target in targets) if config else (),
        verdict=verdict,
        partly_compiled=times.kind == "partly compiled",
        compile_seconds=seconds,
        graphs=graphs.total(),
        graph_breaks=len(of("graph_break")),
        recompiles=len(of("recompile")),
        cache_hits=sum(event.cache_hits for event in of("cache")),
        fallbacks=len(of("fallback")),
        verified=_describe_comparisons(of("verify")),
        eager_step_ms=eager_ms,
        compiled_step_ms=compiled_ms,
        speedup=speedup,
        samples=min(counts) if counts else None,
        break_even_steps=savings.break_even_steps if savings and speedup else None,
        net_seconds_saved=savings.net_seconds if savings else None,
        diagnostics=PhaseDiagnostics(
            cache_misses=sum(event.cache_misses for event in of("cache")),
            eager_samples=len(times.eager_ms) if counts else None,
            compiled_samples=len(times.compiled_ms) if counts else None,
            eager_spread_ms=spread_ms(times.eager_ms),
            compiled_spread_ms=spread_ms(times.compiled_ms),
            eager_peak_memory_mib=eager_peak.mib,
            eager_peak_memory_at_most_mib=eager_peak.at_most_mib,
            peak_memory_mib=peak.mib,
            peak_memory_at_most_mib=peak.at_most_mib,
            saved_for_backward_mib=sum(saved.values()) if saved else None,
            max_abs_error=max(errors, default=None),
            skipped_passes=len(of("pass_skipped")),
            passes=tuple(
                {"target": key.target, **run}
                for key, run in recorder.pass_runs
                if key.phase == phase and (candidate is None or key.candidate == candidate)
            ),
            steps=dict(steps.items()),
            trials=tuple(dict(trial) for trial in trials if details),
            series=series,
            net_series=net_series(series, savings.net_seconds, outside) if savings and series else {},
            restored=("eager_step_ms", "eager_spread_ms") if times.restored else (),
            events=tuple(event.to_dict() for event in recorder.events if details and event.phase == phase),
        ),
    )


def uncompiled_report(configs: Mapping[Phase, PhaseConfig]) -> CompileReport:
    """Return the report of a run that has not started."""
    phases = {p: PhaseReport(mode=config.describe() if config else EAGER) for p, config in configs.items()}
    return CompileReport(train=phases["train"], infer=phases["infer"])


def compare(times: StepTimes) -> Verdict | None:
    """Compare step times without the compile time. Return ``None`` if no compiled step was timed."""
    if not times.compiled_ms:
        return None
    if min(len(times.eager_ms), len(times.compiled_ms)) < MIN_SAMPLES:
        return "too few samples"
    low, high = speedup_interval(times.eager_ms, times.compiled_ms)
    return "faster" if low > 1 else "slower" if high < 1 else "no difference"


def _describe_comparisons(comparisons: Sequence[CompileEvent]) -> str | None:
    """Describe the number of compared graphs by result: ``"equal 12, not compared 2 (dropout)"``."""
    counts: Counter[tuple[str, str]] = Counter()
    for event in comparisons:
        if event.verdict is not None:
            why_not = f" ({(event.reason or '').partition(':')[0]})" if event.verdict == "not compared" else ""
            counts[event.verdict, why_not] += 1
    ordered = sorted(counts.items(), key=lambda item: _RESULTS.index(item[0][0]))
    return ", ".join(f"{result} {count}{why_not}" for (result, why_not), count in ordered) or None
