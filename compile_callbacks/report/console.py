"""Prints reports, tables and single lines to the terminal; rich renders the tables."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_callbacks.report.data import PhaseReport, RunReport
from compile_callbacks.report.summary import next_step, notes, verdict_lines
from compile_callbacks.report.table import main_table, zeros_line

if TYPE_CHECKING:
    from rich.table import Table


_UNLIMITED = 10_000  # characters in a line
_PLAIN_TEXT_WIDTH = 120
_CELL_WIDTH = 60


def make_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    numbers: bool = True,
    width: int = _CELL_WIDTH,
) -> Table:
    """Make a rich table."""
    from rich.box import Box  # imported here, because a process that prints no table does not need rich
    from rich.table import Table
    from rich.text import Text

    line = "    \n"
    ascii_rule_below_the_head = Box(line * 2 + " -- \n" + line * 5, ascii=True)
    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=ascii_rule_below_the_head,
        show_edge=False,
        pad_edge=False,
    )
    for index, name in enumerate(head):
        right = numbers and index > 0
        table.add_column(
            Text(name), justify="right" if right else "left", max_width=width if numbers else None, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def to_text(table: Table, width: int = _UNLIMITED) -> str:
    """Render a table as plain text, without colors and trailing spaces."""
    from rich.console import Console

    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False)
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_table(table: Table, plain_width: int = _UNLIMITED) -> None:
    """Print a table as wide as the terminal, or as plain text if stdout is not a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(table)
    else:
        sys.stdout.write(to_text(table, plain_width) + "\n")


def print_texts(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table of texts, and wrap them at the width of the terminal."""
    width = shutil.get_terminal_size((_PLAIN_TEXT_WIDTH, 0)).columns
    print_table(make_table(head, rows, title=title, numbers=False), width)


def grouped_table(
    head: Sequence[str], reports: Sequence[PhaseReport], *, verdicts: bool = False, width: int = _CELL_WIDTH
) -> Table:
    """Make the main table: a row for each figure, a column for each report, and a heading for each group of rows."""
    rows: list[tuple[str, ...]] = [("verdict", *(report.verdict or "-" for report in reports))] if verdicts else []
    for group in main_table(reports):
        rows += [(group.title, *("" for _ in reports)), *((f"  {label}", *cells) for label, *cells in group.rows)]
    return make_table(head, rows, width=width)


def report_parts(report: RunReport) -> tuple[list[str], Table, list[str]]:
    """Return the parts of a printed report: the verdicts, the table, and the lines below the table."""
    phases, todo = report.compiled_phases, next_step(report)
    reports = [report.phase(phase) for phase in phases]
    below = [zeros_line(reports), *notes(report), f"next: {todo}" if todo else ""]
    return verdict_lines(report), grouped_table(("", *phases), reports), list(filter(None, below))


def to_plain_text(report: RunReport) -> str:
    """Render a report as plain text."""
    verdicts, table, below = report_parts(report)
    return "\n".join([*verdicts, *([""] if verdicts else []), to_text(table), *below])


def print_report(report: RunReport) -> None:
    """Print a report."""
    verdicts, table, below = report_parts(report)
    sys.stdout.write("\ntorch.compile report\n")
    sys.stdout.write("".join(f"{line}\n" for line in verdicts) + "\n")
    print_table(table)
    sys.stdout.write("".join(f"{line}\n" for line in below) + "\n")
    sys.stdout.flush()
