"""What only TensorBoard gets: one page of charts, the report as text, the plot, and recorded graphs."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
    "step time in ms, eager and compiled": ("step/{phase}/eager_ms", "step/{phase}/compiled_ms"),
    "net seconds saved": ("step/{phase}/net_seconds_saved",),
    "seconds spent compiling": ("compile/{phase}/seconds",),
    "recompiles": ("compile/{phase}/recompiles",),
    "peak memory of a compiled step in MiB": ("step/{phase}/peak_memory_mib",),
}


def layout() -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the custom-scalars tab, by phase; the one of the peak memory only if there is a GPU."""
    charts = {title: tags for title, tags in _CHARTS.items() if torch.cuda.is_available() or "memory" not in title}
    return {
        f"torch.compile, {phase} phase": {
            # Tags are regular expressions that match from the start. A logger's prefix may precede the tag.
            title: ["Multiline", [rf"(.*-)?{tag.format(phase=phase)}$" for tag in tags]]
            for title, tags in charts.items()
        }
        for phase in PHASES
    }


def add_layout_if_none(writer: SummaryWriter) -> None:
    """Add the charts, unless the run has a layout. It may be the user's, and TensorBoard uses the last one of a run."""
    folder = Path(writer.log_dir)
    if not folder.is_dir():
        return  # a URL: looking for a layout could mean a large download
    writer.flush()
    if not any(_contains(path, _LAYOUT_TAG) for path in folder.glob("*tfevents*") if path.stat().st_size):
        writer.add_custom_scalars(layout())


def _contains(path: Path, text: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(text) >= 0


def add_report(writer: SummaryWriter, report: CompileReport, step: int, tag: str = "compile_report") -> None:
    """Add the report to the text tab."""
    writer.add_text(tag, to_markdown(report, environment()), step)


def add_plot(writer: SummaryWriter, report: CompileReport, step: int) -> None:
    """Add the plot to the images tab, if matplotlib is installed."""
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
