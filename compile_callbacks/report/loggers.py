"""Writes the report of `InductorCompile` to Lightning's loggers and their folder.

Call these functions on every rank: only rank zero writes. If a logger or a directory fails, the functions warn.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks._utils.errors import warn_user
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.report.file import append_record, make_record
from compile_callbacks.report.render import details_to_text
from compile_callbacks.report.report import CompileReport

if TYPE_CHECKING:
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.utils.tensorboard import SummaryWriter


PLOT_TAG = "compile_report/steps"

_CHARTS = {
    "peak memory of a compiled step in MiB": ("step/{}/peak_memory_mib",),
    "recompiles": ("compile/{}/recompiles",),
    "seconds spent compiling": ("compile/{}/seconds",),
    "net seconds saved": ("step/{}/net_seconds_saved",),
    "step time in ms: compiled (line), eager (edge of the shade)": ("step/{}/compiled_ms", "step/{}/eager_ms"),
}
"""The scalar of each line, and of the other edge of the shade next to it. TensorBoard 2 shows the last chart first."""


def _add_layout_if_none(logger: TensorBoardLogger) -> None:
    """Add the charts of the custom-scalars tab, unless the run has a layout, which TensorBoard would replace.

    A margin chart draws a line and a shade. TensorBoard colors lines by run, so two lines of a run look the same, and
    it smooths all charts but margin charts.
    """
    folder, prefix = Path(logger.experiment.log_dir), getattr(logger, "_prefix", "")
    if not folder.is_dir():
        return  # the folder is a URL, and searching it for a layout could download large files
    logger.experiment.flush()
    if any(b"custom_scalars__config__" in path.read_bytes() for path in folder.glob("*tfevents*")):
        return
    begin, layout = f"{prefix}{logger.LOGGER_JOIN_CHAR}" if prefix else "", {}
    for phase in PHASES:
        lines = {title: [begin + tags[i].format(phase) for i in (0, 0, -1)] for title, tags in _CHARTS.items()}
        layout[f"torch.compile, {phase} phase"] = {title: ["Margin", of_chart] for title, of_chart in lines.items()}
    logger.experiment.add_custom_scalars(layout)


def _add_report(writer: SummaryWriter, report: CompileReport, step: int, texts: Mapping[str, str]) -> None:
    """Add the report and other texts to the text tab, and the plot to the images tab, if matplotlib is installed."""
    for tag, text in {"compile_report": f"{report}\n\n{details_to_text(report.phases)}", **texts}.items():
        writer.add_text(tag, textwrap.indent(text, "    "), step)  # indented text is code in Markdown
    has_steps = any(phase.diagnostics.series for phase in report.phases.values())
    if has_steps and importlib.util.find_spec("matplotlib") is not None:
        import numpy as np  # a dependency of matplotlib

        canvas: Any = report.plot().canvas
        canvas.draw()
        writer.add_image(PLOT_TAG, np.asarray(canvas.buffer_rgba()), step, dataformats="HWC")


_done: WeakValueDictionary[tuple[str, int], Logger] = WeakValueDictionary()  # by id, as a logger may be unhashable


def _first_time(what: str, logger: Logger) -> bool:
    if _done.get((what, id(logger))) is logger:
        return False
    _done[what, id(logger)] = logger
    return True


@rank_zero_only
def log(
    loggers: Sequence[Logger],
    step: int,
    scalars: Mapping[str, float],
    report: CompileReport | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Log scalars. TensorBoard also gets a layout of charts, and a report with its plot and more texts."""
    for logger in loggers:
        try:
            if scalars:
                logger.log_metrics(metrics=dict(scalars), step=step)
            # Of the package ``lightning`` or ``pytorch_lightning``.
            if any(cls.__name__ == "TensorBoardLogger" for cls in type(logger).__mro__):
                board = cast("TensorBoardLogger", logger)
                if any(name.startswith("compile/") for name in scalars) and _first_time("layout", logger):
                    _add_layout_if_none(board)
                if report is not None and (report.has_figures or texts):
                    _add_report(board.experiment, report, step, texts)
        except Exception as error:
            if _first_time("failed", logger):
                what = f"{type(logger).__name__} did not accept the compile report: {type(error).__name__}: {error}"
                warn_user("CC404", f"{what}. The run continues")


def _folder_of_run(logger: Logger) -> str | None:
    """Return the folder in which a logger keeps the files of a run, or ``None`` if it has no folder."""
    if isinstance(folder := getattr(logger, "log_dir", None), str | Path):  # a mock is an os.PathLike
        return os.fspath(folder)
    if not isinstance(logger.save_dir, str | Path) or not logger.save_dir:
        return None
    # The folder of the checkpoints in Lightning's ModelCheckpoint. Several runs share the save_dir.
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{os.fspath(logger.save_dir).rstrip('/')}/{logger.name}/{version}"


@rank_zero_only
def write_report(trainer: Trainer, report: CompileReport, exception: BaseException | None) -> str | None:
    """Append a record of the trainer call to ``compile_report.json`` in the folder of a logger.

    Return the path of the file, which is relative if the working directory contains the file. Write no file and return
    ``None`` in a ``fast_dev_run``, or if no logger has a folder.
    """
    folder = None
    try:
        folder = next(filter(None, map(_folder_of_run, trainer.loggers)), None)
        if folder is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return None
        call = str(trainer.state.fn.value) if trainer.state.fn is not None else "unknown"
        record = make_record(report.to_dict(), call, trainer.global_step, exception)
        return append_record(get_filesystem(folder), folder, record).removeprefix(f"{Path.cwd()}/")
    except Exception as error:
        reason, where = f"{type(error).__name__}: {error}", folder or "the folder of the logger"
        warn_user("CC403", f"the compile report was not written to {where}: {reason}. The run continues without it")
        return None


def lightning_package(instance: object, base: str) -> str:
    """Return which package has the base class ``base``: ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""
    module = next((cls.__module__ for cls in type(instance).__mro__ if cls.__name__ == base), "lightning.pytorch")
    return "pytorch_lightning" if module.startswith("pytorch_lightning.") else "lightning.pytorch"


def print_line(trainer: Trainer, line: str) -> None:
    """Print a line on rank zero, above an active progress bar or as a log message."""
    bar = trainer.progress_bar_callback
    if not trainer.is_global_zero:
        return
    if bar is not None and getattr(bar, "is_enabled", False) and sys.stdout.isatty():
        bar.print(line)
    else:
        # Users silence it together with Lightning's messages.
        logging.getLogger(lightning_package(trainer, "Trainer")).info(line)
