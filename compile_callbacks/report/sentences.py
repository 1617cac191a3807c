"""Writes the sentences that all views of a report share: the verdict of each phase, notes, and the next step."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.profiling.comparison import MAX_FACTOR, MIN_SAMPLES
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.report.figures import PhaseReport

MAX_STEP_TIME_VARIATION = 0.25
"""The largest ± of a step time, as a share of its median, that is not noise. Compiling often gains as much."""

_CLEAR_DIFFERENCE = 1.1  # the factor between two medians that a reader does not call equal
_EXPLAIN = "compile-callbacks explain"


def verdict_lines(phases: Mapping[Phase, PhaseReport]) -> list[str]:
    """Return one line for each phase that ran, which tells whether the phase repaid its compile time."""
    return [f"{phase:<7} {text}" for phase, report in phases.items() if (text := describe_verdict(phase, report))]


def describe_verdict(phase: Phase, report: PhaseReport) -> str:
    """Return the verdict of a phase in a sentence, or an empty string if the phase did not run or is left eager."""
    back = _event(report, "sent_back")
    claim, net = f"runs eagerly again: {back['reason']}" if back else _claim(report), report.net_seconds_saved or 0
    if not claim:
        return ""
    if net <= -0.05 and report.verdict != "compile time not repaid":  # the table shows a smaller loss as 0.0
        claim += f"; lost {_duration(-net)} so far"
    claim += f"; mode {report.mode} ({report.mode_reason})" if report.mode_reason else ""
    without_effect = _event(report, "freezing") or _event(report, "cudagraph_skip")
    if without_effect and without_effect["why"] not in claim:
        claim += f"; {without_effect['why']}"
    if noise := _noise(report):
        return f"{claim}; step times vary {noise}, so other programs may use the machine: measure again"
    return f"{claim}; try {phase}_mode={EAGER!r}" if report.verdict == "slower" else claim


def _claim(report: PhaseReport) -> str:
    """Return the verdict line without losses, settings without effect and advice."""
    details, eager_ms, compiled_ms = report.diagnostics, report.eager_step_ms or 0.0, report.compiled_step_ms or 0.0
    speedup, net, steps = report.speedup or 1.0, report.net_seconds_saved or 0, report.break_even_steps or math.inf
    times, compiling = f"{_ms(eager_ms)} → {_ms(compiled_ms)} ms", _duration(report.compile_seconds or 0)
    faster = f"{_times(speedup)} faster ({times})"
    slower = f"slower by {1 / speedup - 1:.0%}" if 1 / speedup < 1.95 else f"{_times(1 / speedup)} slower"
    spread = _ms(max(details.eager_spread_ms or 0, details.compiled_spread_ms or 0) / 2)
    low, high = details.speedup_interval or (0, math.inf)
    doubt = f"step times vary too much (the speedup may be {low:.2g} to {high:.2g})"
    if max(eager_ms, compiled_ms) > MAX_FACTOR * min(eager_ms, compiled_ms):
        doubt = "such a difference is a fault of the measurement, as when threads wait for each other"
    few = f" ({times}): {report.samples} of one kind, {MIN_SAMPLES} of each are needed"
    if not (eager_ms and compiled_ms):
        few = f": no {'compiled' if eager_ms else 'eager'} steps of the same workload, {compiling} spent compiling"
    uncompiled, code = _why_uncompiled(report)
    claims = {
        None: _why_no_verdict(report),
        "faster": f"{faster}, saved {_duration(net)} after {compiling} of compiling",
        "compile time not repaid": f"{faster}, but {compiling} compiling are not repaid: lost {_duration(-net)} so "
        "far, break-even " + ("never" if math.isinf(steps) else f"after {steps:,.0f} compiled steps"),
        "slower": f"{slower} ({times}): {_why_slower(report)}",
        "no difference": f"no difference ({times.replace('→', 'vs')}, spread ±{spread}), {compiling} spent compiling",
        "not comparable": f"not comparable ({times}): {doubt}; measure again while no other program uses the machine"
        + "; on a CPU, also set OMP_NUM_THREADS=1" * (os.environ.get("OMP_NUM_THREADS") != "1"),
        "too few samples": f"too few samples{few}",
        "still compiling": "not compiled yet: the run was shorter than the compile in the background "
        f"({_count(details.waiting_steps, 'step')} meanwhile)",
        "not compiled": f"not compiled: {uncompiled}" + (f", see {code}" if code else ""),
    }
    return claims.get(report.verdict, "")


def _why_no_verdict(report: PhaseReport) -> str:
    trials = {trial["candidate"]: trial for trial in report.diagnostics.trials}
    if trials and report.mode == EAGER:
        reason = trials.pop(EAGER)["reason"]
        results = ", ".join(f"{name} {trial['verdict']}" for name, trial in trials.items())
        reason = reason or (trial["reason"] if len(trials) == 1 and (trial := next(iter(trials.values()))) else "")
        return f"eager kept: {results}" + (f" ({reason})" if reason else "")
    if trials and all(trial["verdict"] != "chosen" for trial in trials.values()):
        return "no candidate is chosen yet: the phase ran too few steps"
    if not_requested := _event(report, "not_requested"):
        return f"not compiled: {not_requested['reason']}"
    if (report.verified or "").startswith("differs"):
        return f"the comparison with eager ended the run: {report.verified}"
    has_baseline = report.mode != EAGER and report.eager_step_ms is not None
    return "not compiled yet: only eager baseline steps have run" if has_baseline else ""


def notes(phases: Mapping[Phase, PhaseReport]) -> list[str]:
    """Return the lines below the table: changes of torch, candidates of a `Tune`, settings of Dynamo, eager calls."""
    lines = list(dict.fromkeys(note for report in phases.values() for note in report.diagnostics.torch_notes))
    for phase, report in phases.items():
        verdict, details = describe_verdict(phase, report), report.diagnostics
        reasons = [(f"{trial['candidate']} {trial['verdict']}", trial["reason"]) for trial in details.trials]
        found = [f"{what}: {reason}" for what, reason in reasons if reason and reason not in verdict]
        found += [f"{_count(calls, 'call')} of {name} ran eagerly" for name, calls in details.eager_calls.items()]
        lines += [f"{phase}: {note}" for note in found]
    return lines


def next_step(phases: Mapping[Phase, PhaseReport]) -> str | None:
    """Return the advice about the most important problem, or ``None`` if there is no problem."""
    ranks = zip(*(_next_steps(phase, report) for phase, report in phases.items()), strict=True)
    return next((advice for of_both_phases in ranks for applies, advice in of_both_phases if applies), None)


def _next_steps(phase: Phase, report: PhaseReport) -> list[tuple[Any, str]]:
    """Return whether the phase has each problem, and the advice about it, the most important first."""
    verdict, details = report.verdict, report.diagnostics
    failed, recompile, broken = (_event(report, kind) or {} for kind in ("fallback", "recompile", "graph_break"))
    code, fix = _why_uncompiled(report)[1] if verdict == "not compiled" else "", recompile.get("fix")
    where = f" ({Path(broken['file']).name}:{broken.get('line', '?')})" if broken.get("file") else ""
    cached = "train longer" if report.cache_hits else "train longer, or set cache_dir to compile only in the first run"
    more = " in the first call, with a larger baseline_steps" if (details.compiled_samples or 0) >= MIN_SAMPLES else ""
    again = verdict == "not comparable" or (_noise(report) and verdict in ("slower", "no difference"))
    unsure = next((e for e in details.events if e.get("verdict") == "not compared" and e.get("fix")), {})
    return [
        ((report.verified or "").startswith("differs"), f"find out why {phase} differs from eager: {_EXPLAIN} CC302"),
        (code, f"read why {phase} is not compiled: {_EXPLAIN} {code}"),
        (failed, f"read why a part of {phase} runs eagerly: {_EXPLAIN} {failed.get('code', 'CC301')}"),
        (broken, f"{phase} has {_count(report.graph_breaks, 'graph break')}{where}: {broken.get('why')}"),
        (fix, f"{phase} has {_count(report.recompiles, 'recompile')} ({recompile.get('reason')}): {fix}"),
        (verdict == "slower" and not again, f"{phase}_mode={EAGER!r} leaves the phase eager"),
        (again, f"measure {phase} again while no other program uses the machine"),
        (verdict == "compile time not repaid" and report.break_even_steps != math.inf, cached),
        (verdict == "too few samples", f"run more {phase} steps{more}"),
        (verdict == "no difference" and not details.trials, f"{phase}_mode='auto' tries other modes"),
        (unsure, f"{phase} has a graph that was not compared with eager ({unsure.get('reason')}): {unsure.get('fix')}"),
    ]


def _noise(report: PhaseReport) -> str:
    """Return how much step times vary if that may decide the verdict, or an empty string."""
    if report.verdict not in ("faster", "compile time not repaid", "slower", "no difference"):
        return ""
    medians, details = (report.eager_step_ms or 0.0, report.compiled_step_ms or 0.0), report.diagnostics
    sides = zip(medians, (details.eager_spread_ms, details.compiled_spread_ms), strict=True)
    variation = max((spread / 2 / median for median, spread in sides if median and spread), default=0.0)
    unclear = "too much" * (report.verdict == "no difference" and max(medians) > _CLEAR_DIFFERENCE * min(medians))
    return f"by ±{variation:.0%}" if variation > MAX_STEP_TIME_VARIATION else unclear


def _why_slower(report: PhaseReport) -> str:
    """Return what may have made the steps slower. The figures do not show that it did."""
    if skipped := _event(report, "cudagraph_skip"):
        return str(skipped["why"])
    for kind in ("fallback", "eager_call", "recompile", "graph_break"):
        if event := _event(report, kind):
            count, which = len(report.diagnostics.events_of(kind)), "first" if kind == "graph_break" else "last"
            reason = event["why"] if count == 1 else f"the {which}: {event['why']}"
            return f"possible cause: {_count(count, kind.replace('_', ' '))} ({reason})"
    return "torch reports no cause"


def _why_uncompiled(report: PhaseReport) -> tuple[str, str]:
    """Return the reason why a phase has no compiled graph, and the code of the message that explains the reason."""
    causes = {"fallback": "fell back to eager", "eager_call": "runs eagerly", "graph_break": "has a graph break"}
    for kind, what in causes.items():
        if event := _event(report, kind):
            code = "CC101" if kind == "graph_break" else event.get("code", "CC301")
            return f"{event['target']!r} {what}, because {event['why']}", code
    if report.compile_seconds is None:
        return "the steps call no target", "CC102"
    waited, calls = report.diagnostics.waiting_steps, report.diagnostics.eager_calls
    if calls and not waited:
        target = max(calls, key=calls.__getitem__)
        return f"none of the graphs of {target!r} fits {_count(calls[target], 'call')}", "CC103"
    return "most steps " + ("ran before the compiled code was loaded" if waited else "called no compiled graph"), ""


def _event(report: PhaseReport, kind: str) -> Mapping[str, Any] | None:
    """Return the last event of a kind. Of graph breaks, return the first, which often causes the others."""
    events = report.diagnostics.events_of(kind)
    event = events[0 if kind == "graph_break" else -1] if events else None
    return event and {**event, "why": short_reason(event.get("reason"))}


def _count(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def _times(speedup: float) -> str:
    return f"{speedup:.2f}x" if speedup < 1.95 else f"{speedup:.1f}x"


def _ms(value: float) -> str:
    """Format milliseconds with three digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _duration(seconds: float) -> str:
    """Format seconds for a reader: ``"3 min 12 s"``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{seconds:.1f} s" if seconds < 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
