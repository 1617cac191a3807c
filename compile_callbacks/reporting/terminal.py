"""What is said in the terminal: lines while something compiles, and the table at the end of a run."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from compile_callbacks.phases import PHASES
from compile_callbacks.reporting.console import print_rich, shows_rich
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.reporting.table import labels_and_cells

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

REPORT_TITLE = "torch.compile report"

_log = logging.getLogger("lightning.pytorch")  # where Lightning's users look, and how they turn it off


def say(trainer: Trainer, line: str) -> None:
    """A line that does not tear up a progress bar; a log line where there is no terminal. On rank zero alone."""
    if not trainer.is_global_zero:
        return
    bar = trainer.progress_bar_callback
    if bar is not None and getattr(bar, "is_enabled", False) and sys.stdout.isatty():
        bar.print(line)
    else:
        _log.info(line)


def report_table(report: CompileReport) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of a report's table."""
    return ("", *PHASES), labels_and_cells([report.phase(phase) for phase in PHASES])


def print_report(report: CompileReport) -> None:
    """The report's table: by rich where it is installed and there is a terminal to show it, else plain."""
    if shows_rich():
        print_rich(*report_table(report), title=REPORT_TITLE, justify="right")
        for note in report.notes():
            print(note)  # noqa: T201
    else:
        print(f"\n{report}\n", flush=True)  # noqa: T201
