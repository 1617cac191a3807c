"""What only TensorBoard gets: a layout of charts, the report as text, a plot, and recorded graphs."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_callbacks._utils.phases import PHASES
from compile_callbacks.passes.library.record_graphs import RecordedGraph
from compile_callbacks.report.file import environment
from compile_callbacks.report.report import CompileReport
from compile_callbacks.report.table import to_markdown

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PLOT_TAG = "compile_report/steps"
_LAYOUT_TAG = b"custom_scalars__config__"
_CHARTS = {
    "ms a step, eager and compiled": ("step/{phase}/eager_ms", "step/{phase}/compiled_ms"),
    "speedup": ("step/{phase}/speedup",),
    "seconds spent compiling": ("compile/{phase}/seconds",),
}
_LAYOUT = {
    f"compile: {phase}": {
        # Tags are regular expressions that match from the start. A logger's prefix may precede the tag.
        title: ["Multiline", [rf"(.*-)?{tag.format(phase=phase)}$" for tag in tags]]
        for title, tags in _CHARTS.items()
    }
    for phase in PHASES
}


def add_layout_if_none(writer: SummaryWriter) -> None:
    """Show eager and compiled step times in one chart of the custom-scalars tab, unless the run has a layout.

    TensorBoard uses the last layout of a run, and an earlier one may be the user's.
    """
    folder = Path(writer.log_dir)
    if not folder.is_dir():
        return  # a URL: looking for a layout could mean a large download
    writer.flush()
    if not any(_contains(path, _LAYOUT_TAG) for path in folder.glob("*tfevents*") if path.stat().st_size):
        writer.add_custom_scalars(_LAYOUT)


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def add_report(writer: SummaryWriter, report: CompileReport, step: int, tag: str = "compile_report") -> None:
    """Add the report to the text tab."""
    writer.add_text(tag, to_markdown(report, environment()), step)


def add_plot(writer: SummaryWriter, report: CompileReport, step: int) -> None:
    """Add the plot of step times to the images tab, if matplotlib is installed."""
    has_steps = any(report.phase(phase).diagnostics.series for phase in PHASES)
    if not has_steps or importlib.util.find_spec("matplotlib") is None:
        return
    import numpy as np  # a dependency of matplotlib

    canvas: Any = report.plot().canvas
    canvas.draw()
    writer.add_image(PLOT_TAG, np.asarray(canvas.buffer_rgba()), step, dataformats="HWC")


def add_graphs(writer: SummaryWriter, graphs: Iterable[RecordedGraph], step: int) -> None:
    """Add recorded graphs to the text tab, each under its title."""
    for graph in graphs:
        writer.add_text(f"graphs/{graph.title}", "\n".join(f"    {line}" for line in graph.text.splitlines()), step)
