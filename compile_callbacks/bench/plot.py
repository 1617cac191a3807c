"""Step times as bars, for whoever looks at a folder of results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compile_callbacks.bench.rows import BenchRow
from compile_callbacks.phases import PHASES
from compile_callbacks.settings.mode import EAGER

_EAGER_COLOR, _COLOR, _GRAY = "#8c8c8c", "#2b6cb0", "#a0a0a0"


def plot(rows: Sequence[BenchRow], title: str, path: Path) -> None:
    """Write a PNG with a panel for each phase and a bar for each mode: median step time, and half its spread each way.

    Args:
        rows: What was measured.
        title: What stands above.
        path: Where to.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    phases = [phase for phase in PHASES if any(row.phase == phase for row in rows)]
    most_rows = max(sum(row.phase == phase for row in rows) for phase in phases)
    figure = Figure(figsize=(8, 1.4 + len(phases) * (0.6 + 0.5 * most_rows)), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would choose and keep a backend for the whole process
    figure.suptitle(title, fontsize=10)
    for phase, axes in zip(phases, figure.subplots(len(phases), 1, squeeze=False)[:, 0], strict=True):
        of_phase = [row for row in rows if row.phase == phase]
        axes.barh(
            range(len(of_phase)),
            [row.step_ms or 0 for row in of_phase],
            xerr=[(row.spread_ms or 0) / 2 for row in of_phase],
            color=[_EAGER_COLOR if row.name == EAGER else _COLOR for row in of_phase],
            ecolor="black",
            capsize=3,
            height=0.65,
        )
        widest = max((row.step_ms or 0) + (row.spread_ms or 0) / 2 for row in of_phase)
        for index, row in enumerate(of_phase):
            end = (row.step_ms or 0) + (row.spread_ms or 0) / 2
            color = _GRAY if row.step_ms is None else "black"
            axes.text(end + widest * 0.015, index, _label(row), va="center", fontsize=9, color=color)
        axes.set_xlim(0, widest * 1.3)
        axes.set_yticks(range(len(of_phase)), [row.name for row in of_phase])
        axes.invert_yaxis()
        axes.set_xlabel(f"ms a step, {phase}")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _label(row: BenchRow) -> str:
    if row.step_ms is None:
        return "failed"
    speedup = "" if row.report.speedup is None else f"  ({row.report.speedup:.2f}x)"
    return f"{row.step_ms:.2f} ms{speedup}"
