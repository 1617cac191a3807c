"""Prints reports, tables and single lines to the terminal; rich renders the tables."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_callbacks.report.data import RunReport
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


def print_texts(head: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table of texts, and wrap them at the width of the terminal."""
    table = make_table(head, rows, title=title, numbers=False)
    sys.stdout.write(to_text(table, _width(_PLAIN_TEXT_WIDTH)) + "\n")


def _width(plain_width: int) -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else plain_width


def to_plain_text(report: RunReport, width: int = _UNLIMITED) -> str:
    """Render a report as plain text: the verdicts, the table, and the lines below the table."""
    phases, todo = report.compiled_phases, next_step(report)
    reports = [report.phase(phase) for phase in phases]
    rows: list[tuple[str, ...]] = []
    for group in main_table(reports):
        rows += [(group.title, *("" for _ in reports)), *((f"  {label}", *cells) for label, *cells in group.rows)]
    table = to_text(make_table(("", *phases), rows), width)
    below = filter(None, [zeros_line(reports), *notes(report), f"next: {todo}" if todo else ""])
    return "\n".join([*verdict_lines(report), "", table, *below])


def print_report(report: RunReport) -> None:
    """Print a report."""
    sys.stdout.write(f"\ntorch.compile report\n{to_plain_text(report, _width(_UNLIMITED))}\n\n")
    sys.stdout.flush()
