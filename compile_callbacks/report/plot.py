"""Step times over the steps of a run, as a matplotlib figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compile_callbacks._utils.phases import PHASES, Phase

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from compile_callbacks.report.report import CompileReport, PhaseReport

_EAGER, _COMPILED, _COMPILING, _BREAK_EVEN = "#8c8c8c", "#2b6cb0", "#dd6b20", "#2f855a"
_ORDER = ("eager", "compiled", "compiling")
_TRIED = ("#b794f4", "#81c784", "#e6b800", "#f48fb1", "#4dd0e1", "#a1887f")


def plot_report(report: CompileReport) -> Figure:
    """Draw a report; see `CompileReport.plot`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ImportError("CompileReport.plot needs matplotlib: pip install matplotlib") from error
    phases = [phase for phase in PHASES if report.phase(phase).diagnostics.series]
    if not phases:
        message = "no step was timed yet, so there is nothing to plot: plot after a trainer has run"
        raise ValueError(message)
    figure = Figure(figsize=(10, 3.2 * len(phases)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)  # pyplot would choose a backend for the whole process, and keep the figure
    for phase, axes in zip(phases, figure.subplots(len(phases), 1, squeeze=False)[:, 0], strict=True):
        _draw(axes, phase, report.phase(phase))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
        axes.xaxis.set_major_formatter("{x:,.0f}")
    return figure


def _draw(axes: Axes, phase: Phase, report: PhaseReport) -> None:
    last = max(max(part["steps"]) for part in report.diagnostics.series)
    tried = iter(_TRIED * len(report.diagnostics.series))
    for part in sorted(report.diagnostics.series, key=lambda part: _ORDER.index(part["kind"])):
        steps = part["steps"]
        if part["kind"] == "compiling":
            label = f"{len(steps)} {'step that compiles' if len(steps) == 1 else 'steps that compile'}"
            lines: Any = {"transform": axes.get_xaxis_transform(), "lw": 1.1, "alpha": 0.8, "zorder": 1}
            axes.vlines(steps, 0, 1, color=_COMPILING, label=label, **lines)
            continue
        eager, ours = part["kind"] == "eager", part["candidate"] in (None, report.mode)
        color = _EAGER if eager else _COMPILED if ours else next(tried)
        label = _shortened("eager" if eager else part["candidate"] or "compiled") + ("" if ours else ", tried")
        known = report.eager_step_ms if eager else report.compiled_step_ms
        median = known if ours and known is not None else statistics.median(part["ms"])
        axes.scatter(steps, part["ms"], s=18 if len(steps) <= 60 else 6, color=color, alpha=0.55, lw=0, zorder=2)
        # The eager median is the baseline of the whole run.
        ends, style = ((1, last), "--") if eager else ((min(steps), max(steps)), "-")
        label += f",{chr(10) if len(label) > 18 else ' '}median {median:.3g} ms"
        axes.plot(ends, (median, median), color=color, lw=1.6, ls=style, zorder=4, label=label)
    if report.eager_step_ms is not None and not any(part["kind"] == "eager" for part in report.diagnostics.series):
        label = f"eager, median {report.eager_step_ms:.3g} ms,\nof the run before this one"
        axes.axhline(report.eager_step_ms, color=_EAGER, lw=1.4, ls="--", label=label)
    _mark_break_even(axes, report)
    edge = max(0.02 * last, 0.3)
    axes.set(xlim=(1 - edge, last + edge), ylim=(0, _top(report)))
    axes.set_title(_title(phase, report), loc="left", fontsize=10)
    axes.set_xlabel(f"{phase} step", fontsize=9)
    axes.set_ylabel("ms a step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)


def _mark_break_even(axes: Axes, report: PhaseReport) -> None:
    if report.break_even_steps is None:
        return
    if math.isinf(report.break_even_steps):
        axes.plot([], [], color=_BREAK_EVEN, ls=":", label="break-even: never")
        return
    first = min((min(part["steps"]) for part in report.diagnostics.series if part["kind"] != "eager"), default=1)
    at = first + report.break_even_steps  # may be to the right of the panel
    axes.axvline(at, color=_BREAK_EVEN, lw=1.6, ls=":", label=f"break-even at step {at:,.0f}")


def _top(report: PhaseReport) -> float:
    """The upper end of the panel: above all medians and nearly all steps, because a few slow ones would flatten it."""
    times: list[list[float]] = [part["ms"] for part in report.diagnostics.series if part["kind"] != "compiling"]
    times = times or [part["ms"] for part in report.diagnostics.series]
    medians = [ms for ms in (report.eager_step_ms, report.compiled_step_ms) if ms is not None]
    most = max([*medians, *map(statistics.median, times)])
    nearly_all = max(_quantile(part, 0.97) for part in times)
    return 1.15 * max(most, min(nearly_all, 3 * most))


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _title(phase: Phase, report: PhaseReport) -> str:
    seconds = "" if report.compile_seconds is None else f", compiled in {report.compile_seconds:.3g} s"
    speedup = "" if report.speedup is None else f", {report.speedup:.2f}x as fast as eager"
    return f"{phase}: {_shortened(report.mode, 50)}{seconds}{speedup}"


def _shortened(text: str, longest: int = 26) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
