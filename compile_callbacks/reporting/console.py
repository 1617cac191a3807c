"""Tables on standard output: by rich where it is installed and there is a terminal to show it, else plain."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from compile_callbacks.reporting.table import plain_table

if TYPE_CHECKING:
    from rich.table import Table

_PLAIN_WIDTH = 120  # characters of a line, where there is no terminal to ask


def shows_rich() -> bool:
    """Whether tables are drawn by rich."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_figures(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of figures: labels to the left, and the rest to the right.

    Args:
        head: What stands above the columns.
        rows: As many cells each.
    """
    if shows_rich():
        print_rich(head, rows, justify="right")
    else:
        sys.stdout.write(plain_table([tuple(head)], [tuple(row) for row in rows]) + "\n")


def print_texts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts, all to the left and wrapped where the line is too short for them.

    Args:
        head: What stands above the columns.
        rows: As many cells each; a cell may have several lines.
    """
    if shows_rich():
        print_rich(head, rows, justify="left")
    else:
        width = shutil.get_terminal_size((_PLAIN_WIDTH, 0)).columns
        sys.stdout.write(wrapped_table(head, rows, width) + "\n")


def print_rich(head: Sequence[str], rows: Sequence[Sequence[str]], *, justify: str, title: str = "") -> None:
    """Print a table by rich; see `rich_table`."""
    from rich.console import Console

    Console().print(rich_table(head, rows, justify=justify, title=title))


def rich_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, justify: str, title: str = "") -> Table:
    """A table as rich draws it, cells of all columns but the first justified as told."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left")
    for index, label in enumerate(head):
        table.add_column(label, justify="left" if index == 0 else justify)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # not as markup, which brackets would be
    return table


def wrapped_table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Lay out rows as plain text to the left, wrapped so that lines have at most ``width`` characters.

    Where that leaves a column less room than its longest word, lines are longer.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    narrowest = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        room = [(w, index) for index, w in enumerate(widths) if w > narrowest[index]]
        if not room:
            break
        widths[max(room)[1]] -= 1
    rule = "  ".join("-" * w for w in widths)
    return "\n".join([*_in_lines(head, widths), rule, *(line for row in rows for line in _in_lines(row, widths))])


def _in_lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [
        [part for line in cell.splitlines() for part in textwrap.wrap(line, w, break_on_hyphens=False)]
        for cell, w in zip(row, widths, strict=True)
    ]
    return [
        "  ".join(
            (cell[index] if index < len(cell) else "").ljust(w) for cell, w in zip(cells, widths, strict=True)
        ).rstrip()
        for index in range(max(map(len, cells)))
    ]
