"""``compile-callbacks bench``: modes of torch.compile side by side on one module."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import torch

from compile_callbacks._utils.device import parse_device
from compile_callbacks._utils.messages import check_choice, in_one_line
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.cli.bench_candidate import load
from compile_callbacks.cli.bench_measure import BenchError, as_result, measure
from compile_callbacks.config.mode import EAGER, as_config
from compile_callbacks.report.console import make_table, print_table

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_DESCRIPTION = "Measure steps of a module in eager mode and in each mode. The exit status is 1 if a mode fails."
_COLUMNS = {
    "mode": "{}", "compile_seconds": "{:.1f}", "first_step_seconds": "{:.2f}", "step_ms": "{:.2f}",
    "spread_ms": "{:.2f}", "samples": "{}", "speedup": "{:.2f}x", "break_even_steps": "{:.0f}",
    "relative_error": "{:.1e}", "peak_memory_mib": "{:.0f}", "fallbacks": "{}",
}  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("bench", help="measure modes side by side on a module", description=_DESCRIPTION)
    add = parser.add_argument
    add("module", metavar="MODULE", help="package:factory, a function without arguments that returns a module, or a "
        "module and its inputs")  # fmt: skip
    add("--modes", nargs="+", metavar="MODE", help="modes and templates, listed by `compile-callbacks modes`, or an "
        "InductorConfig as JSON (default: default, and on a GPU reduce-overhead)")  # fmt: skip
    add("--phase", default="infer", help="train, infer or both (default: infer)")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--precision", default="fp32", help="fp32, or bf16 or fp16 for autocast (default: fp32)")
    add("--input", metavar="SHAPE", help="shape of a random input, such as 4x3x224x224, if the factory returns none")
    add("--steps", type=int, metavar="N", help="timed steps of each mode (default: 20 on a CPU, 200 on a GPU)")
    add("--json", action="store_true", help="print the rows as JSON")
    parser.set_defaults(command=bench)


def bench(args: argparse.Namespace) -> int:
    """Measure, and print the table.

    Returns:
        The exit status: 1 if a mode failed, 2 for a wrong argument.
    """
    try:
        check_choice("--phase", args.phase, [*PHASES, "both"])
        check_choice("--precision", args.precision, list(_PRECISIONS))
        if args.steps is not None and args.steps < 1:
            raise ValueError(f"--steps={args.steps} must be 1 or more")
        device = parse_device(args.device)
        default = ["default"] if device.type == "cpu" else ["default", "reduce-overhead"]
        modes = {mode: as_config(_parse_mode(mode), "--modes") for mode in args.modes or default if mode != EAGER}
        subject = load(args.module, device, None if args.input is None else _shape(args.input))
        steps = args.steps or (20 if device.type == "cpu" else 200)
    except (ValueError, TypeError) as error:
        return _refuse(error)
    rows: list[dict[str, Any]] = []
    try:
        for phase in PHASES:
            if args.phase in (phase, "both"):
                rows += measure(subject, modes, phase, steps=steps, dtype=_PRECISIONS[args.precision], say=_say)
    except BenchError as error:
        return _refuse(error)
    title = f"{args.module}, inputs {subject.shapes()}, {args.precision}"
    result = as_result(title, rows, shlex.join(["compile-callbacks", *sys.argv[1:]]))
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print_tables(result)
    return 1 if any(row["failure"] for row in rows) else 0


def _parse_mode(text: str) -> Any:
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError as error:
        raise ValueError(f"--modes={text!r} is not valid JSON: {error}") from error


def _shape(text: str) -> Sequence[int]:
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(f"--input={text!r} must be a shape such as 4x3x224x224")
    return [int(size) for size in text.split("x")]


def _print_tables(result: dict[str, Any]) -> None:
    for phase in dict.fromkeys(row["phase"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["phase"] == phase]
        shown = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
        head = [name.replace("_seconds", " s").replace("_mib", " MiB").replace("_", " ") for name in shown]
        cells = [["-" if row.get(n) is None else _COLUMNS[n].format(row[n]) for n in shown] for row in rows]
        print_table(make_table(head, cells, title=f"{phase}: {result['title']}, {result['device']}"))
        for row in rows:
            failure = [f"failed: {row['failure']}"] if row["failure"] else []
            for line in [*failure, *row.get("notes", ())]:
                sys.stdout.write(f"{row['mode']}, {phase}: {line}\n")


def _refuse(error: Exception) -> int:
    _say(in_one_line(f"compile-callbacks bench: {error}", width=1000))
    return 2


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
