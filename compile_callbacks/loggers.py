"""What was measured, to Lightning's loggers: scalars to all of them, and to each what else it has a place for.

Each function here costs a logger that raises its numbers, not the run, and is called on every rank: loggers are
written on rank zero.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.links import see
from compile_callbacks.pass_library.record_graphs import RecordedGraph
from compile_callbacks.phases import PHASES
from compile_callbacks.reporting.environment import environment
from compile_callbacks.reporting.export_report import ExportReport
from compile_callbacks.reporting.hparams import JoinedHyperparameters, WriteEntry
from compile_callbacks.reporting.markdown import to_markdown
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.reporting.table import labels_and_cells


class _Loggers:
    """A set of loggers that keeps none of them alive, and needs none to be hashable."""

    def __init__(self) -> None:
        self._by_id: WeakValueDictionary[int, Logger] = WeakValueDictionary()

    def __contains__(self, logger: Logger) -> bool:
        return self._by_id.get(id(logger)) is logger

    def add(self, logger: Logger) -> None:
        self._by_id[id(logger)] = logger


_failed = _Loggers()  # warned about once each
_laid_out = _Loggers()  # have the layout of custom scalars


@rank_zero_only
def join_hparams(loggers: Sequence[Logger], report: Callable[[], CompileReport]) -> None:
    """Have TensorBoard's HPARAMS entry of the run that begins name the modes and targets.

    To be called before Lightning writes the module's hyperparameters, in the callback's ``setup``.

    Args:
        loggers: The trainer's loggers.
        report: Tells what is compiled, when the entry is written.
    """
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger) and _compiles(report()):
            JoinedHyperparameters(logger, _entry_writer(logger, report)).join()


@rank_zero_only
def log_scalars(loggers: Sequence[Logger], scalars: Mapping[str, float], step: int) -> None:
    """Give every logger the scalars.

    Args:
        loggers: The trainer's loggers.
        scalars: Values by name.
        step: The trainer's global step.
    """
    if not scalars:
        return
    for logger in loggers:
        with _costs_its_numbers_only(logger):
            logger.log_metrics(dict(scalars), step=step)
            if logger not in _laid_out and _tensorboard().is_writer(experiment := _experiment(logger)):
                _tensorboard().add_layout(experiment)
                _laid_out.add(logger)


@rank_zero_only
def log_summary(
    loggers: Sequence[Logger], report: CompileReport, step: int, graphs: Sequence[RecordedGraph] = ()
) -> None:
    """Give every logger that has a place for it the whole report.

    TensorBoard gets a layout of charts, the report in the text tab, step times as an image, and an entry under HPARAMS;
    Weights & Biases a table; MLflow a file; Comet a text.

    Args:
        loggers: The trainer's loggers.
        report: What was measured in the run.
        step: The trainer's global step.
        graphs: Graphs that were recorded in the run, for TensorBoard's text tab.
    """
    for logger in loggers:
        if report.has_figures:
            with _costs_its_numbers_only(logger):
                _summarize(logger, report, step)
                if _tensorboard().is_writer(_experiment(logger)):
                    _tensorboard().add_graphs(_experiment(logger), graphs, step)
        if isinstance(logger, TensorBoardLogger):
            _leave_hparams(logger, report)


@rank_zero_only
def log_export(loggers: Sequence[Logger], report: ExportReport, step: int) -> None:
    """Give every logger the figures of an export, and TensorBoard its table as text.

    Args:
        loggers: The trainer's loggers.
        report: What came of the export.
        step: The trainer's global step.
    """
    for logger in loggers:
        with _costs_its_numbers_only(logger):
            if scalars := report.scalars():
                logger.log_metrics(scalars, step=step)
            if _tensorboard().is_writer(experiment := _experiment(logger)):
                experiment.add_text(
                    "export_report", "\n".join(f"    {line}" for line in str(report).splitlines()), step
                )


def _summarize(logger: Logger, report: CompileReport, step: int) -> None:
    experiment = _experiment(logger)
    if _tensorboard().is_writer(experiment):
        _tensorboard().add_layout(experiment)
        _tensorboard().add_report(experiment, report, step)
        _tensorboard().add_plot(experiment, report, step)
    elif callable(log_table := getattr(logger, "log_table", None)):  # WandbLogger
        rows = labels_and_cells([report.phase(phase) for phase in PHASES])
        log_table("compile_report", columns=["figure", *PHASES], data=[list(row) for row in rows], step=step)
    elif callable(log_text := getattr(experiment, "log_text", None)):
        text = to_markdown(report, environment())
        if hasattr(logger, "run_id"):  # MLFlowLogger
            log_text(logger.run_id, text, "compile_report.md")
        else:  # CometLogger
            log_text(text, step=step)


def _leave_hparams(logger: TensorBoardLogger, report: CompileReport) -> None:
    """Write the entry that the user's hyperparameters have not brought about."""
    joined = JoinedHyperparameters.on(logger)
    # Hyperparameters that were logged and brought about none: the logger was told to write no entry for them. The
    # user may write one after the run (log_hyperparams with metrics), which ours would keep from counting.
    if joined is None or logger.hparams:
        return
    joined.leave()
    if report.has_figures:
        _entry_writer(logger, lambda: report)({}, {})


def _entry_writer(logger: TensorBoardLogger, report: Callable[[], CompileReport]) -> WriteEntry:
    def write(params: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        prefix = logger._prefix + logger.LOGGER_JOIN_CHAR if logger._prefix else ""  # there is no public way to ask
        names = [prefix + name for name in metrics]
        with _costs_its_numbers_only(logger):
            _tensorboard().add_hparams(logger.experiment, params, report(), metrics=names, prefix=prefix)

    return write


def _tensorboard() -> Any:
    """What knows TensorBoard's files: its protocol buffers take 0.1 s to import, for those alone who log."""
    from compile_callbacks.reporting import tensorboard

    return tensorboard


def _experiment(logger: Logger) -> Any:
    return getattr(logger, "experiment", None)


def _compiles(report: CompileReport) -> bool:
    return any(report.phase(phase).mode != "eager" for phase in PHASES)


@contextlib.contextmanager
def _costs_its_numbers_only(logger: Logger) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if logger in _failed:
            return
        _failed.add(logger)
        message = f"{type(logger).__name__} did not take the compile report: {type(error).__name__}: {error}"
        warnings.warn(see(message, "a-logger-failed"), CompileWarning, stacklevel=4)
