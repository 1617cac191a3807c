"""Draws the step times of a run with matplotlib. See `CompileReport.plot`."""

from __future__ import annotations

import io
import statistics
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("CompileReport.plot needs matplotlib: pip install matplotlib") from error

from compile_callbacks._utils.messages import in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.sentences import describe_verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_EAGER_COLOR = "#8c8c8c"
_COMPILED_COLOR = "#2b6cb0"
_COMPILING_COLOR = "#dd6b20"


class _NotebookFigure(Figure):
    """A figure that notebooks show as a picture. Notebooks show other figures only after pyplot was imported."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture)
        return picture.getvalue()


def plot_phases(phases: Mapping[Phase, PhaseReport]) -> Figure:
    """Draw a row for each phase, which contains the step times."""
    timed = {phase: report for phase, report in phases.items() if report.diagnostics.series}
    if not timed:
        raise ValueError("no step was timed yet, so there is nothing to plot: call plot() after a trainer has run")
    figure = _NotebookFigure(figsize=(12, 3.9 * len(timed)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would select a backend for the process and keep the figure in memory
    rows = figure.subfigures(len(timed), 1, squeeze=False)[:, 0]
    for (phase, report), row in zip(timed.items(), rows, strict=True):
        verdict = describe_verdict(phase, report) or "no verdict"
        title = f"{phase}: {in_one_line(report.mode, 40)} — {verdict}"
        row.suptitle(textwrap.fill(title, 160), x=0.01, ha="left", fontsize=10)
        axes = row.subplots()
        _draw_times(axes, report)
        axes.set_xlabel(f"{phase} step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False, fontsize=8, ncols=2)
    return figure


def _draw_times(axes: Axes, report: PhaseReport) -> None:
    """Draw the times of eager and compiled steps with the settings of the phase, and mark the steps that compiled."""
    series, medians, times = report.diagnostics.series, [0.0], [0.0]
    last = max(max(entry["steps"]) for entry in series)
    edge = max(0.02 * last, 0.3)
    axes.set_title("step time in ms", loc="left", fontsize=9)
    axes.set_xlim(1 - edge, last + edge)
    for entry in series:
        if entry["kind"] == "compiling" or entry["candidate"] not in (None, report.mode):
            continue
        steps, eager = entry["steps"], entry["kind"] == "eager"
        color = _EAGER_COLOR if eager else _COMPILED_COLOR
        known = report.eager_step_ms if eager else report.compiled_step_ms
        median = statistics.median(entry["ms"]) if known is None else known
        label = f"{in_one_line(entry['candidate'] or entry['kind'], 26)}: {median:.3g} ms"
        axes.scatter(steps, entry["ms"], s=18 if len(steps) <= 60 else 6, color=color, alpha=0.55, lw=0, zorder=2)
        # The eager median is the baseline of the whole run.
        ends, style = ((1, last), "--") if eager else ((min(steps), max(steps)), "-")
        axes.plot(ends, (median, median), color=color, lw=1.6, ls=style, zorder=4, label=label)
        times += entry["ms"]
        medians.append(median)
    # The axis starts at zero. A few slow steps would flatten the curve.
    axes.set_ylim(0, 1.15 * min(max(times + medians), 2 * max(medians)) or None)
    if steps := [step for entry in series if entry["kind"] == "compiling" for step in entry["steps"]]:
        label, across = f"{len(steps)} steps that compile", axes.get_xaxis_transform()
        label = "step that compiles" if len(steps) == 1 else label
        axes.vlines(steps, 0, 1, color=_COMPILING_COLOR, label=label, transform=across, lw=1.1, alpha=0.8, zorder=1)
