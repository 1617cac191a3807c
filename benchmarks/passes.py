"""The gain of each graph pass of the library: a model with the pass, without it in the same mode, and eager.

Blocks of steps of the three alternate; a cell is the median of its blocks in milliseconds a step. `verified` is the
library's comparison of the graphs with eager.

python benchmarks/passes.py [--rows TritonMaxPoolBackward ...] [--mode reduce-overhead] [--batch-size 128]
                            [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from bench_measure import BenchmarkedModule, measure
from models import make
from tables import Row, parser_for, print_columns, save, say

from compile_callbacks import InductorConfig
from compile_callbacks.passes import TritonMaxPoolBackward

ROWS = [
    (TritonMaxPoolBackward, "train", ["resnet18", "resnet50", "densenet121"]),
]
COLUMNS = {
    "pass": "{}", "model": "{}", "phase": "{}", "eager_ms": "{:.3f}", "without_ms": "{:.3f}", "with_ms": "{:.3f}",
    "ratio": "{:.3f}", "verified": "{}",
}  # fmt: skip


def compare(graph_pass: Any, phase: str, model: str, args: argparse.Namespace) -> Row:
    rows = run(graph_pass, phase, model, args)
    if graph_pass.name not in rows["with"]["passes"]:
        raise RuntimeError(f"{graph_pass.name} changed nothing in {model}")
    return {
        "pass": graph_pass.name,
        "model": model,
        "phase": phase,
        "eager_ms": rows["eager"]["step_ms"],
        "without_ms": rows["without"]["step_ms"],
        "with_ms": rows["with"]["step_ms"],
        "ratio": rows["without"]["step_ms"] / rows["with"]["step_ms"],
        "verified": ", ".join(rows["with"]["verified"]),
        "samples": rows["with"]["samples"],
    }


def run(graph_pass: Any, phase: str, model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    torch._dynamo.reset()
    net, images, _ = make(model, args.batch_size, args.image_size, args.device)
    modes = {"without": InductorConfig(mode=args.mode), "with": InductorConfig(mode=args.mode, passes=(graph_pass,))}
    benchmarked = BenchmarkedModule(model, torch.device(args.device), net, (images,))
    rows = {row["mode"]: row for row in measure(benchmarked, modes, phase, steps=args.steps, dtype=torch.bfloat16)}
    for name, row in rows.items():
        if row["failure"]:
            raise RuntimeError(f"{graph_pass.name}, {model}, {name}: {row['failure']}")
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", help="names of passes (default: all)")
    add("--models", nargs="+", help="only these models")
    add("--mode", default="reduce-overhead")
    add("--batch-size", type=int, default=128)
    add("--image-size", type=int, default=224)
    add("--steps", type=int, default=200)
    args = parser.parse_args()
    rows = []
    for make_pass, phase, models in ROWS:
        graph_pass = make_pass([args.device])
        for model in models:
            if graph_pass.name in (args.rows or [graph_pass.name]) and model in (args.models or [model]):
                rows.append(compare(graph_pass, phase, model, args))
                say(str(rows[-1]))
                save(args.json, f"Graph passes, batch {args.batch_size}, {args.mode}", rows)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
