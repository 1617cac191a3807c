"""Writes the report of `InductorCompile` to Lightning's loggers and their folder.

Call these functions on every rank: only rank zero writes. If a logger or a directory fails, the functions warn.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks._utils.errors import warn_user
from compile_callbacks.report.file import append_record, make_record
from compile_callbacks.report.render import details_to_text
from compile_callbacks.report.report import CompileReport

if TYPE_CHECKING:
    from lightning.pytorch.loggers import TensorBoardLogger
    from torch.utils.tensorboard import SummaryWriter


PLOT_TAG = "compile_report/steps"


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


_failed: weakref.WeakValueDictionary[int, Logger] = weakref.WeakValueDictionary()  # by id; some are unhashable


@rank_zero_only
def log(
    loggers: Sequence[Logger],
    step: int,
    scalars: Mapping[str, float],
    report: CompileReport | None = None,
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Log scalars. TensorBoard also gets a report, with its plot and more texts."""
    for logger in loggers:
        try:
            if scalars:
                logger.log_metrics(metrics=dict(scalars), step=step)
            # Of the package ``lightning`` or ``pytorch_lightning``.
            is_board = any(cls.__name__ == "TensorBoardLogger" for cls in type(logger).__mro__)
            if is_board and report is not None and (report.has_figures or texts):
                _add_report(cast("TensorBoardLogger", logger).experiment, report, step, texts)
        except Exception as error:
            if _failed.get(id(logger)) is not logger:
                _failed[id(logger)] = logger
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


def print_line(trainer: weakref.ref[Trainer], line: str) -> None:
    """Print a line on rank zero, above an active progress bar or as a log message."""
    if (alive := trainer()) is None or not alive.is_global_zero:
        return
    bar = alive.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False) and sys.stdout.isatty():
        bar.print(line)
    else:
        # Users silence it together with Lightning's messages.
        logging.getLogger(lightning_package(alive, "Trainer")).info(line)
