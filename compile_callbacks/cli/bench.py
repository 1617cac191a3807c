"""``compile-callbacks bench``: measures modes of torch.compile side by side on one module."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks._utils.device import parse_device
from compile_callbacks._utils.import_ref import resolve
from compile_callbacks._utils.messages import check_choice, describe_failure, in_one_line
from compile_callbacks._utils.phases import PHASES
from compile_callbacks.cli.bench_measure import BenchmarkedModule, as_result, measure
from compile_callbacks.config.inductor_config import EAGER, as_config
from compile_callbacks.report.console import make_table, print_table

_PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_COLUMNS: dict[str, Callable[[Any], str]] = {
    "mode": str, "compile_seconds": "{:.1f}".format, "step_ms": "{:.2f}".format, "spread_ms": "{:.2f}".format,
    "samples": str, "speedup": "{:.2f}x".format, "break_even_steps": "{:.0f}".format, "verified": ", ".join,
    "peak_memory_mib": "{:.0f}".format, "fallbacks": str,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = "Measure steps of a module in eager and in each mode. The exit status is 1 if a mode fails."
    add = parser.add_argument
    add("module", metavar="MODULE", help="package:factory, where factory() returns a module, or a tuple of a module "
        "and its inputs")  # fmt: skip
    add("--modes", nargs="+", metavar="MODE", help="modes and templates, listed by `compile-callbacks modes`, or an "
        "InductorConfig as JSON (default: default, and on a GPU reduce-overhead)")  # fmt: skip
    add("--phase", default="infer", help="train, infer or both (default: infer)")
    add("--device", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    add("--precision", default="fp32", help="fp32, or bf16 or fp16 for autocast (default: fp32)")
    add("--input", metavar="SHAPE", help="shape of a random input, such as 4x3x224x224, if the factory returns none")
    add("--steps", type=int, metavar="N", help="timed steps of each mode (default: 20 on a CPU, 200 on a GPU)")
    add("--json", action="store_true", help="print the rows as JSON")


def run(args: argparse.Namespace) -> int:
    """Measure and print the table. Return status 1 if a mode failed, and 2 if an argument is wrong."""
    rows: list[dict[str, Any]] = []
    try:
        check_choice("--phase", args.phase, [*PHASES, "both"])
        check_choice("--precision", args.precision, list(_PRECISIONS))
        if args.steps is not None and args.steps < 1:
            raise ValueError(f"--steps={args.steps} must be 1 or more")
        device = parse_device(args.device)
        default = ["default"] if device.type == "cpu" else ["default", "reduce-overhead"]
        modes = {}
        for mode in args.modes or default:
            if mode != EAGER:
                modes[mode] = as_config(json.loads(mode) if mode.startswith("{") else mode, "--modes")
        benchmarked = _load(args.module, device, args.input)
        steps = args.steps or (20 if device.type == "cpu" else 200)
        for phase in PHASES:
            if args.phase in (phase, "both"):
                rows += measure(benchmarked, modes, phase, steps=steps, dtype=_PRECISIONS[args.precision], say=_say)
    except json.JSONDecodeError as error:
        _say(f"compile-callbacks bench: --modes={error.doc!r} is not valid JSON: {error}")
        return 2
    except (ValueError, TypeError) as error:
        _say(in_one_line(f"compile-callbacks bench: {error}", width=1000))
        return 2
    title = f"{args.module}, inputs {benchmarked.shapes()}, {args.precision}"
    result = as_result(title, rows, shlex.join(["compile-callbacks", *sys.argv[1:]]))
    if args.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        _print_tables(result)
    return 1 if any(row["failure"] for row in rows) else 0


def _load(name: str, device: torch.device, shape: str | None) -> BenchmarkedModule:
    """Call the factory ``package:factory``, and move its module and inputs to the device."""
    if shape is not None and not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", shape):
        raise ValueError(f"--input={shape!r} must be a shape such as 4x3x224x224")
    torch.manual_seed(0)
    made = _call_factory(name)
    module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        expected = "a torch.nn.Module, or a tuple of a module and its inputs"
        raise ValueError(f"MODULE={name!r}: the factory must return {expected}, not {type(made).__name__}")
    if inputs is None and shape is None:
        raise ValueError(f"MODULE={name!r} returns no inputs: set the input's shape, such as --input 4x3x224x224")
    if inputs is not None and shape is not None:
        raise ValueError(f"--input has no effect: {name!r} returns its own inputs")
    inputs = torch.randn(*map(int, shape.split("x"))) if shape is not None else inputs
    inputs = tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
    if isinstance(inputs, Mapping):
        return BenchmarkedModule(name, device, module.to(device), kwargs=inputs)
    return BenchmarkedModule(
        name, device, module.to(device), tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    )


def _call_factory(name: str) -> Any:
    package, _, attribute = name.partition(":")
    if not (package and attribute):
        raise ValueError(f"MODULE={name!r} must have the form package:factory, such as torchvision.models:resnet18")
    if (current := str(Path.cwd())) not in sys.path:
        # The installed command does not search the current directory. Append the directory, so that its files cannot
        # replace an installed package.
        sys.path.append(current)
    try:
        factory = resolve(name)
    except Exception as error:  # a torchvision built for another torch raises RuntimeError
        reason = error if isinstance(error, ValueError) else f"{name!r} cannot be imported: {describe_failure(error)}"
        raise ValueError(f"MODULE={in_one_line(str(reason))}") from error
    if not callable(factory):
        raise ValueError(f"MODULE={name!r} is not a function, but a {type(factory).__name__}")
    try:
        return factory()
    except Exception as error:
        raise ValueError(f"MODULE={name!r}: the factory failed: {in_one_line(describe_failure(error))}") from error


def _print_tables(result: Mapping[str, Any]) -> None:
    for phase in dict.fromkeys(row["phase"] for row in result["rows"]):
        rows: Sequence[Mapping[str, Any]] = [row for row in result["rows"] if row["phase"] == phase]
        shown = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
        head = [name.replace("_seconds", " s").replace("_mib", " MiB").replace("_", " ") for name in shown]
        cells = [[_COLUMNS[name](row[name]) if row.get(name) is not None else "-" for name in shown] for row in rows]
        print_table(make_table(head, cells, title=f"{phase}: {result['title']}, {result['device']}"))
        for row in rows:
            failure = [f"failed: {row['failure']}"] if row["failure"] else []
            for line in [*failure, *row.get("notes", ())]:
                sys.stdout.write(f"{row['mode']}, {phase}: {line}\n")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
