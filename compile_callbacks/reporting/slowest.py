"""What a run of several processes reports: the figures of the slowest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from compile_callbacks.phases import Phase
from compile_callbacks.reporting.report import PhaseReport, break_even_steps

Figures = Mapping[Phase, Mapping[str, Any]]
"""What a process tells the others of its reports, by phase."""

_OF_STEPS = (
    "eager_step_ms",
    "eager_spread_ms",
    "compiled_step_ms",
    "compiled_spread_ms",
    "speedup",
    "samples",
    "seconds_saved",
)


def figures_of(report: PhaseReport) -> dict[str, Any]:
    """What a process tells of one phase, as plain data."""
    return {name: getattr(report, name) for name in ("compile_seconds", *_OF_STEPS)}


def with_slowest(report: PhaseReport, phase: Phase, of_ranks: Sequence[Figures]) -> PhaseReport:
    """A report with the compile seconds and the step times of the processes for which they are the longest.

    Step times are all of one process, the one with the longest compiled step, or eager step where nothing compiled was
    measured: they compare equal work. Where there is one process, the report is as it was.

    Args:
        report: What this process measured.
        phase: The phase it is of.
        of_ranks: What each process told at the end of a stage, by rank; nothing before the first one.
    """
    if len(of_ranks) < 2:
        return report
    figures = [of_rank[phase] for of_rank in of_ranks]

    def longest(*names: str) -> int | None:
        """The rank with the longest of the first figure that any rank has."""
        for name in names:
            known = {rank: own[name] for rank, own in enumerate(figures) if own[name] is not None}
            if known:
                return max(known, key=known.__getitem__)
        return None

    to_compile, to_step = longest("compile_seconds"), longest("compiled_step_ms", "eager_step_ms")
    changes: dict[str, Any] = {"processes": len(figures), "slowest_rank": to_step}
    if to_compile is not None:
        changes["compile_seconds"] = figures[to_compile]["compile_seconds"]
    if to_step is not None:
        changes |= {name: figures[to_step][name] for name in _OF_STEPS}
    slowest = replace(report, **changes)
    paid = break_even_steps(slowest.compile_seconds, slowest.eager_step_ms, slowest.compiled_step_ms)
    return replace(slowest, break_even_steps=paid)
