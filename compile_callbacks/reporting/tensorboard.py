"""What TensorBoard alone gets: a layout of charts, the report as text and as data, and an entry under HPARAMS."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from compile_callbacks.pass_library.record_graphs import RecordedGraph
from compile_callbacks.phases import PHASES
from compile_callbacks.reporting.environment import environment
from compile_callbacks.reporting.eventfiles import BrokenEventFileError, event_files, read_values
from compile_callbacks.reporting.markdown import to_markdown
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.reporting.report_plot import png_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

TEXT_TAG = "compile_report"
DATA_TAG = "compile_report/data"
"""The report as JSON, for programs: TensorBoard has no tab for it and shows nothing."""
PLOT_TAG = "compile_report/steps"

_LAYOUT_TAG = "custom_scalars__config__"
_CHARTS = {
    "ms a step, eager and compiled": ("step/{phase}/eager_ms", "step/{phase}/compiled_ms"),
    "speedup": ("step/{phase}/speedup",),
    "seconds spent compiling": ("compile/{phase}/seconds",),
}
# TensorBoard shows five metrics unless asked for more, the user's first.
_HPARAM_METRICS = (
    "step/{phase}/speedup",
    "step/{phase}/compiled_ms",
    "compile/{phase}/seconds",
    "step/{phase}/eager_ms",
)


def is_writer(experiment: object) -> bool:
    """Whether a logger's ``experiment`` writes TensorBoard's event files."""
    from torch.utils.tensorboard import SummaryWriter  # a second of import time, for those alone who log

    return isinstance(experiment, SummaryWriter)


# ---------------------------------------------------------------------------------------------- custom scalars


def add_layout(writer: SummaryWriter) -> None:
    """Have the custom-scalars tab show eager and compiled step times on one chart for each phase.

    TensorBoard uses the last layout that was written in a run, and merges those of several runs. So a layout of
    the user's, written before, is taken up into ours; one written later replaces ours, until this is called again.
    """
    ours = _layout()
    titles = {category.title for category in ours.category}
    if found := _written_layouts(writer):
        theirs = [category for category in found[-1].category if category.title not in titles]
        if len(theirs) < len(found[-1].category):
            return  # ours is in the one that counts
        ours = Layout(category=[*theirs, *ours.category])
    _write(writer, _tensor(_LAYOUT_TAG, "custom_scalars", ours.SerializeToString(), shape=()))


def _layout() -> Layout:
    from torch.utils.tensorboard.summary import custom_scalars

    summary = custom_scalars(
        {
            f"compile: {phase}": {
                # Tags are regular expressions, matched from the start; a logger's prefix may stand before ours.
                title: ["Multiline", [rf"(.*-)?{tag.format(phase=phase)}$" for tag in tags]]
                for title, tags in _CHARTS.items()
            }
            for phase in PHASES
        }
    )
    return Layout.FromString(summary.value[0].tensor.string_val[0])


def _written_layouts(writer: SummaryWriter) -> list[Layout]:
    """The layouts in a run's event files; none where the files are not on this machine."""
    folder = Path(writer.log_dir)
    if not folder.is_dir():
        return []
    writer.flush()
    return [layout for path in event_files(folder) for layout in _layouts_in(path)]


def _layouts_in(path: Path) -> Iterator[Layout]:
    # A file of an earlier run that was killed while it wrote may be truncated.
    with contextlib.suppress(BrokenEventFileError):
        for value in read_values(path, [_LAYOUT_TAG.encode()]):
            if value.tag == _LAYOUT_TAG:
                yield Layout.FromString(value.tensor.string_val[0])


# ---------------------------------------------------------------------------------------------- report


def add_report(writer: SummaryWriter, report: CompileReport, step: int) -> None:
    """Write the report: for the text tab as Markdown, and as JSON for whoever reads the event file."""
    ran_on = environment()
    data = json.dumps({"report": report.to_dict(), "environment": ran_on})
    writer.add_text(TEXT_TAG, to_markdown(report, ran_on), step)
    _write(writer, _tensor(DATA_TAG, "compile_callbacks", data.encode(), shape=(1,)), step=step)


def add_plot(writer: SummaryWriter, report: CompileReport, step: int) -> None:
    """Write step times over the steps of the run for the images tab, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None or not any(report.phase(phase).series for phase in PHASES):
        return
    figure = report.plot()
    width, height = figure.canvas.get_width_height()
    image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png_of(figure))
    _write(writer, Summary(value=[Summary.Value(tag=PLOT_TAG, image=image)]), step=step)


def add_graphs(writer: SummaryWriter, graphs: Iterable[RecordedGraph], step: int) -> None:
    """Write recorded graphs for the text tab, each under its title."""
    for graph in graphs:
        writer.add_text(f"graphs/{graph.title}", "\n".join(f"    {line}" for line in graph.text.splitlines()), step)


# ---------------------------------------------------------------------------------------------- hparams


def hparams_of(report: CompileReport) -> dict[str, str]:
    """What a run is compared by in the HPARAMS tab."""
    targets = {target: None for phase in PHASES for target in report.phase(phase).targets}
    modes = {f"compile/{phase}_mode": report.phase(phase).mode for phase in PHASES}
    return modes | {"compile/targets": ", ".join(targets) or "auto"}


def add_hparams(
    writer: SummaryWriter,
    params: Mapping[str, Any],
    report: CompileReport,
    *,
    metrics: Iterable[str] = (),
    prefix: str = "",
    step: int | None = None,
) -> None:
    """Write the run's entry for the HPARAMS tab: modes and targets against what was measured.

    It goes into the run itself, where its metrics are the scalars that are logged anyway, and not into a run below
    it, as ``SummaryWriter.add_hparams`` would have it. TensorBoard takes the table's columns from any one entry
    that it finds, in no order: of two entries with different columns, one run's columns would be hidden, now the
    user's and now ours. So an entry has to hold the user's hyperparameters too, and has to be the run's first,
    which is the one that counts.

    Args:
        writer: Where to.
        params: The user's hyperparameters, nested or not.
        report: What was asked for, and what was measured so far.
        metrics: Names of the user's metrics.
        prefix: What the logger puts before each scalar's name.
        step: The trainer's global step.
    """
    from torch.utils.tensorboard.summary import hparams

    ours = [prefix + tag.format(phase=phase) for tag in _HPARAM_METRICS for phase in PHASES]
    entry = hparams(dict(_flat(params)) | hparams_of(report), dict.fromkeys([*metrics, *ours], 0.0))
    _write(writer, *entry, step=step)


def _flat(params: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | int | float | str]]:
    """Hyperparameters as Lightning writes them: nested names joined with a slash, objects as text."""
    for name, value in params.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
            continue
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        yield f"{prefix}{name}", value if isinstance(value, (bool, int, float, str)) else str(value)


# ---------------------------------------------------------------------------------------------- writing


def _tensor(tag: str, plugin: str, content: bytes, *, shape: tuple[int, ...]) -> Summary:
    dims = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in shape])
    tensor = TensorProto(dtype="DT_STRING", string_val=[content], tensor_shape=dims)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _write(writer: SummaryWriter, *summaries: Summary, step: int | None = None) -> None:
    # The writer's public methods take no summary that is ready; Lightning's logger goes the same way.
    file_writer = writer._get_file_writer()
    for summary in summaries:
        file_writer.add_summary(summary, step)
