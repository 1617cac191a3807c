"""Rows of measurements: options that the benchmarks share, JSON files of rows, and tables of them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from conduct import Group, Pacing, conduct, say

Row = dict[str, Any]


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all of them take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], help="(default: the GPU if there is one)")
    add("--steps", type=int, default=Pacing.steps, help="timed steps of each way, at least")
    add("--blocks", type=int, default=Pacing.blocks, help="blocks that these are in")
    add("--block-seconds", type=float, default=Pacing.block_seconds, help="a block takes that long at least")
    add("--prepare-steps", type=int, default=Pacing.prepare_steps, help="steps of each way before these")
    add("--jobs", type=int, default=Pacing.jobs, help="processes that compile at once")
    add("--patience", type=float, default=Pacing.patience_seconds, metavar="SECONDS",
        help="a way that is not ready after so long is left out")  # fmt: skip
    add("--json", type=Path, help="write rows here, after each group of them")
    add("--from-json", type=Path, nargs="+", metavar="FILE", help="measure nothing: print the table of these files")
    return parser


def pacing(args: argparse.Namespace, **others: Any) -> Pacing:
    """What the options say."""
    return Pacing(
        blocks=args.blocks, steps=args.steps, block_seconds=args.block_seconds, prepare_steps=args.prepare_steps,
        jobs=args.jobs, patience_seconds=args.patience, **others,
    )  # fmt: skip


def rows_of(args: argparse.Namespace, batches: Iterable[Sequence[Group]], paced: Pacing) -> list[Row]:
    """The rows of the files that are given, or measured; those measured are written after each group.

    Args:
        args: What was asked for.
        batches: Groups that prepare together; one batch after the other.
        paced: How it is measured.
    """
    if args.from_json:
        return [row for file in args.from_json for row in json.loads(file.read_text())["rows"]]
    if args.device is None:
        import torch  # not to print a table

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[Row] = []
    for groups in batches:
        for measured in conduct(groups, paced):
            rows += measured
            for row in measured:
                milliseconds = "failed" if row["step_ms"] is None else f"{row['step_ms']:.3f} ms"
                say(f"{row['model']}, {row['phase']}, batch {row['batch_size']}: {row['way']}: {milliseconds}")
            if args.json:
                data = {"command": ["python", *sys.argv], "rows": rows}
                args.json.write_text(json.dumps(data, indent=1))
    return rows


def print_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A Markdown table."""
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for cells in lines:
        print("| " + " | ".join(cells) + " |")
    print()


def print_environment(rows: Iterable[Row]) -> None:
    """What the rows were measured on."""
    for told in {json.dumps(row["environment"]): None for row in rows if "environment" in row}:
        found = json.loads(told)
        print(f"{found.pop('device')}, " + ", ".join(f"{name} {version}" for name, version in found.items()))


def step_ms(rows: Iterable[Row], way: str, **work: Any) -> float | None:
    """The median of a way; ``None`` where it was not measured."""
    row = find(rows, way, **work)
    return None if row is None else row["step_ms"]


def find(rows: Iterable[Row], way: str, **work: Any) -> Row | None:
    """The row of a way to do a work."""
    return next((r for r in rows if r["way"] == way and all(r[k] == v for k, v in work.items())), None)


def in_order(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Any]:
    """What rows have of something, each once, in the order in which it first comes."""
    return list(dict.fromkeys(key(row) for row in rows))


def times(faster: float | None, than: float | None) -> str:
    """How many times as fast one is as the other, for a cell."""
    return "" if not faster or not than else f"{than / faster:.2f}×"


def ms(value: float | None) -> str:
    """Milliseconds for a cell, to three figures or hundredths."""
    return "failed" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean.

    Example::

        >>> geometric_mean([1.0, 4.0])
        2.0
    """
    return math.exp(sum(map(math.log, values)) / len(values))
