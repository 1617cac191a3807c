"""Draws the step times of a run with matplotlib. See `CompileReport.plot`."""

from __future__ import annotations

import io
import statistics
import textwrap
from typing import TYPE_CHECKING, Any

try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("CompileReport.plot needs matplotlib: pip install matplotlib") from error

from compile_callbacks._utils.messages import in_one_line
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.report.data import PhaseReport, RunReport
from compile_callbacks.report.summary import describe_verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_EAGER_COLOR = "#8c8c8c"
_COMPILED_COLOR = "#2b6cb0"
_COMPILING_COLOR = "#dd6b20"
_ORDER = ("eager", "compiled", "compiling")
_CANDIDATES = ("#b794f4", "#81c784", "#e6b800", "#f48fb1", "#4dd0e1", "#a1887f")


class _NotebookFigure(Figure):
    """A figure that notebooks show as a picture. Notebooks show other figures only after pyplot was imported."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture)
        return picture.getvalue()


def plot_report(report: RunReport) -> Figure:
    """Draw a report with a row for each phase, which contains the step times."""
    phases = [phase for phase in PHASES if report.phase(phase).diagnostics.series]
    if not phases:
        message = "no step was timed yet, so there is nothing to plot: call plot() after a trainer has run"
        raise ValueError(message)
    figure = _NotebookFigure(figsize=(12, 3.9 * len(phases)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would select a backend for the process and keep the figure in memory
    for phase, row in zip(phases, figure.subfigures(len(phases), 1, squeeze=False)[:, 0], strict=True):
        phase_report = report.phase(phase)
        verdict = describe_verdict(phase, phase_report) or "no verdict"
        title = f"{phase}: {in_one_line(phase_report.mode, 40)} — {verdict}"
        row.suptitle(textwrap.fill(title, 160), x=0.01, ha="left", fontsize=10)
        axes = row.subplots()
        last = max(max(entry["steps"]) for entry in phase_report.diagnostics.series)
        edge = max(0.02 * last, 0.3)
        _draw_times(axes, phase_report, last)
        _mark_compiles(axes, phase_report)
        axes.set_xlim(1 - edge, last + edge)
        axes.set_xlabel(f"{phase} step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), frameon=False, fontsize=8, ncols=2)
    return figure


def _draw_times(axes: Axes, report: PhaseReport, last: int) -> None:
    """Draw the times of eager and compiled steps. The axis starts at zero."""
    axes.set_title("step time in ms", loc="left", fontsize=9)
    series = report.diagnostics.series
    candidates = iter(_CANDIDATES * len(series))
    for entry in sorted(series, key=lambda entry: _ORDER.index(entry["kind"])):
        if entry["kind"] == "compiling":
            continue
        steps = entry["steps"]
        eager, is_chosen = entry["kind"] == "eager", entry["candidate"] in (None, report.mode)
        color = _EAGER_COLOR if eager else _COMPILED_COLOR if is_chosen else next(candidates)
        name = "eager" if eager else entry["candidate"] or entry["kind"]
        label = in_one_line(name, 26) + ("" if is_chosen else ", tried")
        known = report.eager_step_ms if eager else report.compiled_step_ms
        median = known if is_chosen and known is not None else statistics.median(entry["ms"])
        axes.scatter(steps, entry["ms"], s=18 if len(steps) <= 60 else 6, color=color, alpha=0.55, lw=0, zorder=2)
        # The eager median is the baseline of the whole run.
        ends, style = ((1, last), "--") if eager else ((min(steps), max(steps)), "-")
        axes.plot(ends, (median, median), color=color, lw=1.6, ls=style, zorder=4, label=f"{label}: {median:.3g} ms")
    axes.set_ylim(0, _top(report))


def _mark_compiles(axes: Axes, report: PhaseReport) -> None:
    """Mark the steps that compiled. Mark compiles outside timed steps at the left edge."""
    steps = [step for entry in report.diagnostics.series if entry["kind"] == "compiling" for step in entry["steps"]]
    compiles = [event for event in report.diagnostics.events if event["kind"] == "compile"]
    outside = sum("step" not in event for event in compiles)
    lines: Any = {"transform": axes.get_xaxis_transform(), "lw": 1.1, "alpha": 0.8, "zorder": 1}
    if steps:
        label = "step that compiles" if len(steps) == 1 else f"{len(steps)} steps that compile"
        axes.vlines(steps, 0, 1, color=_COMPILING_COLOR, label=label, **lines)
    if outside:
        label = f"{outside} compile{'s' if outside > 1 else ''} outside these steps"
        axes.vlines([0.7], 0, 1, color=_COMPILING_COLOR, ls=":", label=label, **lines)


def _top(report: PhaseReport) -> float:
    """Return the upper end of the axis, above all medians. A few slow steps would flatten the curve."""
    times: list[list[float]] = [entry["ms"] for entry in report.diagnostics.series if entry["kind"] != "compiling"]
    times = times or [entry["ms"] for entry in report.diagnostics.series]
    medians = [report.eager_step_ms or 0.0, report.compiled_step_ms or 0.0, *map(statistics.median, times)]
    return 1.15 * min(max(*medians, *map(max, times)), 2 * max(medians))
