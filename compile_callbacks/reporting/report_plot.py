"""Step times over the steps of a run, as a matplotlib figure."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from compile_callbacks.links import see
from compile_callbacks.phases import PHASES, Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from compile_callbacks.reporting.report import CompileReport, PhaseReport

_EAGER, _COMPILED, _COMPILING, _BREAK_EVEN = "#8c8c8c", "#2b6cb0", "#dd6b20", "#2f855a"
_TRIED = ("#b794f4", "#81c784", "#e6b800", "#f48fb1", "#4dd0e1", "#a1887f")


def plot_report(report: CompileReport) -> Figure:
    """Draw a report; see `CompileReport.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError(see("CompileReport.plot needs matplotlib: pip install matplotlib", "no-plot")) from error
    phases = [phase for phase in PHASES if report.phase(phase).series]
    if not phases:
        message = "no step was timed yet, so there is nothing to plot: plot after a trainer has run"
        raise ValueError(see(message, "no-plot"))
    figure = Figure(figsize=(10, 3.2 * len(phases)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which would choose and keep a backend for the whole process
    for phase, axes in zip(phases, figure.subplots(len(phases), 1, squeeze=False)[:, 0], strict=True):
        _draw(axes, phase, report.phase(phase))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def png_of(figure: Figure) -> bytes:
    """The figure as a PNG file, of the size that its canvas says."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=figure.dpi)
    return file.getvalue()


def _draw(axes: Axes, phase: Phase, report: PhaseReport) -> None:
    top = _top(report)
    last = max(max(part["steps"]) for part in report.series)
    tried = iter(_TRIED * len(report.series))
    handles = []
    for part in sorted(report.series, key=lambda part: part["kind"] != "eager"):
        if part["kind"] == "compiling":
            continue
        eager, ours = part["kind"] == "eager", part["settings"] in (None, report.mode)
        color = _EAGER if eager else _COMPILED if ours else next(tried)
        name = "eager" if eager else "compiled" if part["settings"] is None else part["settings"]
        median = {"eager": report.eager_step_ms, "compiled": report.compiled_step_ms}[part["kind"]] if ours else None
        label = _shortened(name) + ("" if ours else ", tried")
        handles.append(_draw_steps(axes, part, label, median, color, top, last))
    if report.eager_step_ms is not None and not any(part["kind"] == "eager" for part in report.series):
        label = f"eager, median {report.eager_step_ms:.3g} ms,\nof the run before this one"
        handles.append(axes.axhline(report.eager_step_ms, color=_EAGER, lw=1.4, ls="--", label=label))
    if compiling := [step for part in report.series if part["kind"] == "compiling" for step in part["steps"]]:
        handles.append(_mark_compiles(axes, compiling))
    if report.break_even_steps is not None:
        handles.append(_mark_break_even(axes, report, last))
    axes.set_title(_title(phase, report), loc="left", fontsize=10)
    axes.set_xlabel(f"{phase} step", fontsize=9)
    axes.set_ylabel("ms a step", fontsize=9)
    axes.set_ylim(0, top)
    edge = max(0.02 * last, 0.3)
    axes.set_xlim(1 - edge, last + edge)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)


def _draw_steps(
    axes: Axes, part: Mapping[str, Any], label: str, median: float | None, color: str, top: float, last: int
) -> Any:
    """The steps of one way as points, those above the panel as triangles at its edge, and their median as a line."""
    steps, times = part["steps"], part["ms"]
    size = 18 if len(steps) <= 60 else 6
    axes.scatter(steps, [min(ms, 10 * top) for ms in times], s=size, color=color, alpha=0.55, lw=0, zorder=2)
    above = [step for step, ms in zip(steps, times, strict=True) if ms > top]
    axes.scatter(above, [0.985 * top] * len(above), s=16, marker="^", color=color, lw=0, zorder=3)
    middle = statistics.median(times) if median is None else median
    # The baseline is what all of the run is compared with.
    ends = (1, last) if part["kind"] == "eager" else (min(steps), max(steps))
    style = "--" if part["kind"] == "eager" else "-"
    label += f",{chr(10) if len(label) > 18 else ' '}median {middle:.3g} ms"
    return axes.plot(ends, (middle, middle), color=color, lw=1.6, ls=style, zorder=4, label=label)[0]


def _mark_compiles(axes: Axes, steps: Sequence[int]) -> Any:
    label = f"{len(steps)} {'step that compiles' if len(steps) == 1 else 'steps that compile'}"
    return axes.vlines(
        steps, 0, 1, transform=axes.get_xaxis_transform(), color=_COMPILING, lw=1.1, alpha=0.8, zorder=1, label=label
    )


def _mark_break_even(axes: Axes, report: PhaseReport, last: int) -> Any:
    assert report.break_even_steps is not None
    first = min((min(part["steps"]) for part in report.series if part["kind"] != "eager"), default=1)
    if math.isinf(report.break_even_steps):
        return axes.plot([], [], color=_BREAK_EVEN, ls=":", label="break-even: never")[0]
    at = first + report.break_even_steps
    if at <= last:
        return axes.axvline(at, color=_BREAK_EVEN, lw=1.6, ls=":", label=f"break-even at step {at:,.0f}")
    return axes.plot([], [], color=_BREAK_EVEN, ls=":", label=f"break-even at step {at:,.0f},\nafter this run")[0]


def _top(report: PhaseReport) -> float:
    """Where the panel ends: above nearly all steps and all medians; a few slow ones must not flatten the rest."""
    times: list[list[float]] = [part["ms"] for part in report.series if part["kind"] != "compiling"]
    times = times or [part["ms"] for part in report.series]
    medians = [ms for ms in (report.eager_step_ms, report.compiled_step_ms) if ms is not None]
    most = max([*medians, *map(statistics.median, times)])
    nearly_all = max(_quantile(part, 0.97) for part in times)
    return 1.15 * max(most, min(nearly_all, 3 * most))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _title(phase: Phase, report: PhaseReport) -> str:
    # The sanity check compiles too, and is no step of the run.
    seconds = "" if report.compile_seconds is None else f", compiled in {report.compile_seconds:.3g} s"
    speedup = "" if report.speedup is None else f", {report.speedup:.2f}x as fast as eager"
    return f"{phase}: {_shortened(report.mode, 50)}{seconds}{speedup}"


def _shortened(text: str, longest: int = 26) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
