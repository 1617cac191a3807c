"""Writes the report of an `InductorCompile` callback: to the trainer's loggers, a file and the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from compile_callbacks.callbacks import several_callbacks as several
from compile_callbacks.callbacks.trainer_calls import TrainerCall
from compile_callbacks.report import loggers
from compile_callbacks.report.build import uncompiled_report
from compile_callbacks.report.console import print_line, print_report
from compile_callbacks.report.report import CompileReport

if TYPE_CHECKING:
    from compile_callbacks.callbacks.inductor_compile import InductorCompile


def current_report(own: InductorCompile) -> CompileReport:
    """Return the report of a callback so far, or the report of its copy if only the copy ran."""
    if own.session is not None:
        return own.session.report()
    return own._calls.last.report or uncompiled_report(own.arguments.configs, own.arguments.left_alone)


def log_scalars(trainer: Trainer, own: InductorCompile, *, details: bool = True) -> None:
    """Log the scalars of the report. ``details`` synchronizes the GPU, so use it only at the end of a stage."""
    if own.session and trainer.loggers and trainer.is_global_zero:
        name = several.name_in_logs(several.callbacks_of(trainer, own), own)
        loggers.log_scalars(trainer.loggers, own.session.report(details=details).scalars(name), trainer.global_step)


def write_at_end(trainer: Trainer, own: InductorCompile, call: TrainerCall, exception: BaseException | None) -> None:
    """Write the report when a Trainer call ends, and issue the warnings about the whole run."""
    report = own._calls.last.report = current_report(own)
    name = several.name_in_logs(several.callbacks_of(trainer, own), own)
    loggers.log_scalars(trainer.loggers, report.scalars(name), trainer.global_step)
    graphs = own.arguments.recorded_graphs()
    loggers.log_summary(trainer.loggers, report, trainer.global_step, graphs, name)
    path = loggers.write_report(call.report_folder, trainer, report, exception, name)
    if call.nested or own.session is None or not report.has_figures:
        return
    if exception is None:
        own.session.check_run()
        if not trainer.is_global_zero or (trainer.state.fn != "fit" and own._calls.printed):
            return
        own._calls.printed = True
        print_report(report, name)
    if path is not None:
        print_line(trainer, f"{f'report {name}'.rstrip()}: {path}")
