"""Writes the report of `InductorCompile` to Lightning's loggers and their folder.

Call these functions on every rank: only rank zero writes. If a logger or a directory fails, the functions warn.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakValueDictionary

import torch
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
_log = logging.getLogger("lightning.pytorch")  # users silence it together with Lightning's messages

_CHARTS = {
    "peak memory of a compiled step in MiB": ("step/{}/peak_memory_mib",),
    "recompiles": ("compile/{}/recompiles",),
    "seconds spent compiling": ("compile/{}/seconds",),
    "net seconds saved": ("step/{}/net_seconds_saved",),
    "step time in ms: compiled (line), eager (edge of the shade)": ("step/{}/compiled_ms", "step/{}/eager_ms"),
}
"""The scalar of each line, and of the other edge of the shade next to it. TensorBoard 2 shows the last chart first."""


def _layout(prefix: str) -> dict[str, dict[str, list[Any]]]:
    """Return the charts of the custom-scalars tab, by phase. The chart of the peak memory needs a GPU.

    A margin chart draws a line and a shade. TensorBoard colors lines by run, so two lines of a run look the same, and
    it smooths all charts but margin charts.
    """
    shown = {title: tags for title, tags in _CHARTS.items() if torch.cuda.is_available() or "memory" not in title}
    return {
        f"torch.compile, {phase} phase": {
            title: ["Margin", [prefix + tags[i].format(phase) for i in (0, 0, -1)]] for title, tags in shown.items()
        }
        for phase in PHASES
    }


def _add_layout_if_none(logger: TensorBoardLogger) -> None:
    """Add the charts, unless the run has a layout. TensorBoard uses the last layout, which would replace the user's."""
    writer: SummaryWriter = logger.experiment
    folder = Path(writer.log_dir)
    if not folder.is_dir():
        return  # the folder is a URL, and searching it for a layout could download large files
    writer.flush()
    if not any(b"custom_scalars__config__" in path.read_bytes() for path in folder.glob("*tfevents*")):
        prefix = getattr(logger, "_prefix", "")
        writer.add_custom_scalars(_layout(f"{prefix}{logger.LOGGER_JOIN_CHAR}" if prefix else ""))


def _add_plot(writer: SummaryWriter, report: CompileReport, step: int) -> None:
    """Add the plot to the images tab, if matplotlib is installed."""
    has_steps = any(phase.diagnostics.series for phase in report.phases.values())
    if not has_steps or importlib.util.find_spec("matplotlib") is None:
        return
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
    ``None`` if nothing was compiled, in a ``fast_dev_run``, or if no logger has a folder.
    """
    if not report.has_figures or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    folder = None
    try:
        folder = next(filter(None, map(_folder_of_run, trainer.loggers)), None)
        if folder is None:
            return None
        call = str(trainer.state.fn.value) if trainer.state.fn is not None else "unknown"
        record = make_record(report.to_dict(), call, trainer.global_step, exception)
        path = append_record(get_filesystem(folder), folder, record)
        return path.removeprefix(f"{Path.cwd()}/")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        where = folder or "the folder of the logger"
        warn_user("CC403", f"the compile report was not written to {where}: {reason}. The run continues without it")
        return None


@rank_zero_only
def log(
    loggers: Sequence[Logger],
    step: int,
    scalars: Mapping[str, float],
    texts: Mapping[str, str] = MappingProxyType({}),
    report: CompileReport | None = None,
) -> None:
    """Log scalars. TensorBoard also gets texts, a report and its plot, and a layout of charts if the run has none."""
    for logger in loggers:
        with _warn_if_it_fails(logger):
            if scalars:
                logger.log_metrics(metrics=dict(scalars), step=step)
            if not _writes_tensorboard(logger):
                continue
            if any(name.startswith("compile/") for name in scalars) and _first_time("layout", logger):
                _add_layout_if_none(logger)
            if report is not None and report.has_figures:
                _add_plot(logger.experiment, report, step)
                texts = {"compile_report": f"{report}\n\n{details_to_text(report.phases)}", **texts}
            for tag, text in texts.items():  # indented text is code in Markdown
                logger.experiment.add_text(tag, textwrap.indent(text, "    "), step)


def _writes_tensorboard(logger: Logger) -> TypeGuard[TensorBoardLogger]:
    """Return whether a logger is a TensorBoardLogger of the package ``lightning`` or ``pytorch_lightning``."""
    return any(cls.__name__ == "TensorBoardLogger" for cls in type(logger).__mro__)


@contextlib.contextmanager
def _warn_if_it_fails(logger: Logger) -> Iterator[None]:
    """Issue one warning for each logger instead of its exceptions."""
    try:
        yield
    except Exception as error:
        if _first_time("failed", logger):
            what = f"{type(logger).__name__} did not accept the compile report: {type(error).__name__}: {error}"
            warn_user("CC404", f"{what}. The run continues")


def print_line(trainer: Trainer, line: str) -> None:
    """Print a line on rank zero, above an active progress bar or as a log message."""
    if not trainer.is_global_zero:
        return
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False) and sys.stdout.isatty():
        bar.print(line)
    else:
        _log.info(line)
