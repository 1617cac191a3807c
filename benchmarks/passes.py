"""What each pass of the library gives: a model with it, against the same settings without it, and eager.

Each row is one pass, model and phase. Blocks of steps of the three alternate; a cell is the median of its blocks, in
milliseconds a step. `difference` is that from eager by the norm: of outputs in inference; in training of outputs and
gradients, in float32 on 16 images (bfloat16 gradients of random weights are mostly rounding, eager ones too).

python benchmarks/passes.py [--rows TritonMaxPoolBackward ...] [--mode reduce-overhead] [--batch-size 128]
                            [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks import InductorConfig, TritonMaxPoolBackward, TritonSqueezeExcitation
from compile_callbacks.bench.measure import measure
from compile_callbacks.bench.settings import parse_settings
from compile_callbacks.bench.subject import load

ROWS = [
    (TritonSqueezeExcitation, "infer", ["efficientnet_b0", "mobilenet_v3_large", "regnet_y_3_2gf"]),
    (TritonMaxPoolBackward, "train", ["resnet18", "resnet50", "densenet121"]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", help="names of passes; all by default")
    parser.add_argument("--models", nargs="+", help="only these of a pass's models")
    parser.add_argument("--mode", default="reduce-overhead")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| pass | model | phase | eager ms | without | with | ratio | difference without | with |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for row in measured(args):
        rows.append(row)
        print(
            f"| {row['pass']} | {row['model']} | {row['phase']} | {row['eager_ms']:.3f} | {row['without_ms']:.3f} | "
            f"{row['with_ms']:.3f} | {row['ratio']:.3f} | {row['difference_without']:.1e} | "
            f"{row['difference_with']:.1e} |",
            flush=True,
        )
    if args.json:
        versions = {"torch": torch.__version__, "batch_size": args.batch_size, "mode": args.mode}
        args.json.write_text(json.dumps({**versions, "rows": rows}, indent=2))


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for make, phase, models in ROWS:
        graph_pass = make([args.device])
        for model in models:
            if graph_pass.name in (args.rows or [graph_pass.name]) and model in (args.models or [model]):
                yield row(graph_pass, phase, model, args)


def row(graph_pass: Any, phase: str, model: str, args: argparse.Namespace) -> dict[str, Any]:
    rows = measured_in("bf16", args.batch_size, args.steps, graph_pass, phase, model, args)
    compared = measured_in("fp32", 16, 1, graph_pass, phase, model, args) if phase == "train" else rows
    if not any(run.get("changed") or run.get("from_cache") for run in rows["with"].report.passes):
        raise RuntimeError(f"{graph_pass.name} found nothing in {model}")
    times = {name: found.report.compiled_step_ms for name, found in rows.items()}
    return {
        "pass": graph_pass.name,
        "model": model,
        "phase": phase,
        "eager_ms": rows["with"].report.eager_step_ms,
        "without_ms": times["without"],
        "with_ms": times["with"],
        "ratio": times["without"] / times["with"],
        "difference_without": compared["without"].relative_error,
        "difference_with": compared["with"].relative_error,
        "samples": rows["with"].report.samples,
    }


def measured_in(
    precision: str, batch_size: int, steps: int, graph_pass: Any, phase: str, model: str, args: argparse.Namespace
) -> dict[str, Any]:
    torch._dynamo.reset()
    settings = parse_settings(
        model,
        modes=[],
        phase=phase,
        device=args.device,
        precision=precision,
        batch_size=batch_size,
        steps=steps,
        channels_last=True,
    )
    without = InductorConfig(mode=args.mode)
    configs = {"eager": None, "without": without, "with": InductorConfig(mode=args.mode, passes=(graph_pass,))}
    subject = load(settings)
    trained_statistics(subject.module)
    rows = {row.name: row for row in measure(subject, replace(settings, configs=configs))}
    for found in rows.values():
        if found.failure:
            raise RuntimeError(f"{graph_pass.name}, {model}, {found.name}: {found.failure}")
    return rows


def trained_statistics(module: nn.Module) -> None:
    """Statistics of batch norms as after training: fresh ones compute x * 1 + 0."""
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.5, 1.5)


if __name__ == "__main__":
    main()
