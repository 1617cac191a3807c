"""Reports as tables of text: a row for each figure, a column for each phase of each run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_callbacks.reporting.report import PhaseReport


def labels_and_cells(reports: Sequence[PhaseReport]) -> list[tuple[str, ...]]:
    """Each figure's label, and what it is in each report; rows that no report has a figure for are left out."""
    rows = [(label, *(show(report) for report in reports)) for label, show in _ROWS]
    shown = [row for row in rows if row[0] in _ALWAYS or any(cell != _NOTHING for cell in row[1:])]
    candidates = dict.fromkeys(trial["candidate"] for report in reports for trial in report.trials)
    return shown + [(f"candidate {name}", *(_trial(report, name) for report in reports)) for name in candidates]


def plain_table(heads: Sequence[tuple[str, ...]], rows: Sequence[tuple[str, ...]], *, widest: int = 60) -> str:
    """Lay out rows as plain text, labels to the left and cells to the right.

    Args:
        heads: Rows above the rule.
        rows: Rows below it.
        widest: Cells with more characters than this are cut short.
    """
    cut = [[_shortened(cell, widest) for cell in row] for row in (*heads, *rows)]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = [
        "  ".join((row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))))
        for row in cut
    ]
    lines.insert(len(heads), "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _shortened(text: str, widest: int) -> str:
    return text if len(text) <= widest else text[: widest - 1] + "…"


_NOTHING = "-"


def _listed(names: Sequence[str]) -> str:
    """Names in a line; those of neighbours in a list as one: ``layers.0..23``."""
    runs: list[tuple[str, int, int]] = []
    for name in names:
        stem, _, number = name.rpartition(".")
        if not number.isdecimal():
            runs.append((name, 0, -1))
        elif runs and runs[-1][0] == stem and runs[-1][2] + 1 == int(number):
            runs[-1] = stem, runs[-1][1], int(number)
        else:
            runs.append((stem, int(number), int(number)))
    return ", ".join(
        stem if last < 0 else f"{stem}.{first}" + (f"..{last}" if last > first else "") for stem, first, last in runs
    )


def _number(value: float | None, form: str, unit: str = "") -> str:
    if value is None:
        return _NOTHING
    if math.isinf(value):
        return "never"
    text = format(value, form)
    return (text if float(text) else text.lstrip("-")) + unit


def _step(median: float | None, spread: float | None) -> str:
    return _number(median, ".2f") + ("" if spread is None else f" ± {spread / 2:.2f}")


def _trial(report: PhaseReport, candidate: str) -> str:
    """What came of a candidate, and its step where it was measured: ``4.77 ms, chosen``."""
    found = next((trial for trial in report.trials if trial["candidate"] == candidate), None)
    if found is None:
        return _NOTHING
    return ("" if found["median_ms"] is None else f"{found['median_ms']:.2f} ms, ") + str(found["verdict"])


_ROWS: tuple[tuple[str, Callable[[PhaseReport], str]], ...] = (
    ("mode", lambda p: p.mode),
    ("targets", lambda p: _listed(p.targets) or _NOTHING),
    ("compile seconds", lambda p: _number(p.compile_seconds, ".1f")),
    ("graphs", lambda p: str(p.graphs)),
    ("graph breaks", lambda p: str(p.graph_breaks)),
    ("recompiles", lambda p: str(p.recompiles)),
    ("cache hits / misses", lambda p: f"{p.cache_hits} / {p.cache_misses}"),
    ("eager step ms", lambda p: _step(p.eager_step_ms, p.eager_spread_ms)),
    ("compiled step ms", lambda p: _step(p.compiled_step_ms, p.compiled_spread_ms)),
    ("speedup", lambda p: _number(p.speedup, ".2f", "x")),
    ("samples", lambda p: _number(p.samples, "d")),
    ("break-even steps", lambda p: _number(p.break_even_steps, ".0f")),
    ("seconds saved so far", lambda p: _number(p.seconds_saved, ".1f")),
    ("eager peak memory MB", lambda p: _number(p.eager_peak_memory_mb, ".0f")),
    ("compiled peak memory MB", lambda p: _number(p.peak_memory_mb, ".0f")),
    ("folded weights MB", lambda p: _number(p.folded_mb, ".1f")),
    ("weight refreshes", lambda p: _number(p.weight_refreshes, "d")),
    ("equal to eager", lambda p: p.verified or _NOTHING),
    ("max abs error", lambda p: _number(p.max_abs_error, ".1e")),
    ("fallbacks", lambda p: str(p.fallbacks)),
    ("skipped passes", lambda p: str(p.skipped_passes) if p.skipped_passes else _NOTHING),
)

_ALWAYS = {"mode", "targets", "compile seconds", "eager step ms", "compiled step ms", "speedup", "samples"}
