"""``compile-callbacks bench``: modes of torch.compile side by side on one module."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compile_callbacks.bench import (
    BenchError,
    BenchRow,
    BenchSettings,
    measure,
    parse_settings,
    table,
    told,
    write_results,
)
from compile_callbacks.bench.subject import Subject, load
from compile_callbacks.bench.write import title
from compile_callbacks.failures import in_one_line
from compile_callbacks.reporting.console import print_figures

_DESCRIPTION = """\
Measure eager and compiled steps of a module in alternating blocks, after warming up, and what compiling costs. Weights
are as initialized and images random. A mode that fails is a row of the table; the exit status is then 1.
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="measure modes side by side on a module", description=_DESCRIPTION
    )
    add = parser.add_argument
    add("module", metavar="MODULE", help="a torchvision name, timm/NAME, or package:factory, which is called without "
        "arguments and returns a module, or a module and its inputs")  # fmt: skip
    add("--modes", nargs="+", metavar="MODE", help="modes and templates (`compile-callbacks modes` lists them) beside "
        "eager (default: default, and on a GPU reduce-overhead)")  # fmt: skip
    add("--config", metavar="CONFIG", help="an InductorConfig to measure too: JSON, the path of a JSON file, or base64 "
        "of JSON")  # fmt: skip
    add("--phase", default="infer", help="train, infer or both (default: infer)")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--precision", default="fp32", help="fp32, or bf16 or fp16 for autocast (default: fp32)")
    add("--batch-size", type=int, metavar="N", help="images in a batch (default: 4 on a CPU, 32 on a GPU)")
    add("--image-size", type=int, metavar="PIXELS", help="height and width (default: what the model is made for)")
    add("--channels-last", action="store_true", help="lay out images and weights channels last")
    add("--steps", type=int, metavar="N", help="timed steps of each mode (default: 20 on a CPU, 200 on a GPU)")
    add("--output", type=Path, metavar="DIR", help="folder for results.json, step_ms.png and event files (default: "
        "runs/bench/MODULE)")  # fmt: skip
    parser.set_defaults(command=bench)


def bench(args: argparse.Namespace) -> int:
    """Measure, print the table and write the results.

    Returns:
        The exit status: 1 where a mode failed, 2 for bad input, after which nothing is written.
    """
    options = {name: value for name, value in vars(args).items() if name != "command"}
    try:
        settings = parse_settings(**options)
        subject = load(settings)
    except (ValueError, TypeError) as error:
        return _refuse(error)
    try:
        rows = measure(subject, settings, _say)
    except BenchError as error:
        return _refuse(error)
    _print(rows, settings, subject)
    try:
        lines = write_results(rows, settings, subject)
    except OSError as error:
        sys.stdout.flush()
        _say(f"compile-callbacks bench: results cannot be written: {error}")
        return 1
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 1 if any(row.failure for row in rows) else 0


def _print(rows: Sequence[BenchRow], settings: BenchSettings, subject: Subject) -> None:
    head, cells = table(rows)
    for phase in settings.phases:
        sys.stdout.write(f"\n{phase}: {title(settings, subject)}\n\n")
        print_figures(head, [shown for row, shown in zip(rows, cells, strict=True) if row.phase == phase])
    sys.stdout.write("\n")
    if lines := told(rows):
        sys.stdout.write("".join(f"{line}\n" for line in lines) + "\n")


def _refuse(error: Exception) -> int:
    _say(in_one_line(f"compile-callbacks bench: {error}", width=1000))
    return 2


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
