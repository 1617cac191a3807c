"""Inference with weight folding, against the same settings without it, Inductor's freezing, and eager.

Blocks of calls of the four alternate; a cell is the median of its blocks in milliseconds a call. Other columns: the
memory of the folded tensors; the microseconds of a call that check whether a weight changed; the time to compute the
folded tensors again after every weight changed; the relative error of the folded graph against eager after that.

python benchmarks/fold_weights.py [--models resnet50 ...] [--batch-sizes 1 16 128] [--precisions bf16 fp32]
                                  [--modes default reduce-overhead] [--device cuda] [--image-size 224] [--json FILE]

A model is a torchvision model or, as timm/NAME, a timm model.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
import timeit
import warnings

import torch
from models import make
from tables import Row, parser_for, print_columns, relative_error, save, say
from torch import nn

from compile_callbacks import InductorConfig
from compile_callbacks.cli.bench_measure import BenchmarkedModule, Candidate, alternate, summarize

OPTIONS = {"default": {}, "reduce-overhead": {"triton.cudagraphs": True}}
BLOCKS, BLOCK_SECONDS = 9, 0.05
COLUMNS = {
    "model": "{}", "batch_size": "{}", "precision": "{}", "mode": "{}",
    "eager": "{:.2f}", "plain": "{:.2f}", "folded": "{:.2f}", "frozen": "{:.2f}",
    "folded / frozen": "{:.3f}", "folded / plain": "{:.3f}",
    "folded_mib": "{:.0f}", "check_us": "{:.1f}", "refresh_ms": "{:.2f}", "difference": "{:.1e}",
}  # fmt: skip


def refresh_ms(folded: Candidate) -> float:
    """The additional time of a call that computes the folded tensors again."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(10):
        for suspected in times:
            if suspected:
                folded.switch.invalidate_weights()
            folded.synchronize()
            started = time.perf_counter()
            folded.step()
            folded.synchronize()
            times[suspected].append((time.perf_counter() - started) * 1000)
    return statistics.median(times[True]) - statistics.median(times[False])


def check_us(folded: Candidate) -> float:
    """The time of a call that checks whether a weight changed."""
    graphs = [
        graph
        for compiled_target in folded.switch.compiled_targets("infer")
        for graph in compiled_target.folded_graphs()
    ]
    return sum(min(timeit.repeat(lambda g=g: g._knows(g._seen), number=1000, repeat=5)) * 1000 for g in graphs)


def change_weights(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.2 * torch.rand((), generator=generator).item())


def measure(name: str, batch_size: int, precision: str, mode: str, args: argparse.Namespace) -> Row:
    torch._dynamo.reset()
    net, images, _ = make(name, batch_size, args.image_size, args.device)
    benchmarked = BenchmarkedModule(name, torch.device(args.device), net, (images,))
    options = OPTIONS[mode]
    configs = {
        "eager": None,
        "plain": InductorConfig(options=options),
        "folded": InductorConfig(options=options, fold_weights=True),
        "frozen": InductorConfig(options={**options, "freezing": True}),
    }
    dtype = torch.bfloat16 if precision == "bf16" else None
    candidates = {name: Candidate(name, config, benchmarked, "infer", dtype) for name, config in configs.items()}
    for candidate in candidates.values():
        candidate.prepare()
    eager, folded = candidates["eager"], candidates["folded"]
    calls = max(1, round(BLOCK_SECONDS * 1000 / eager.time(1)))
    samples = alternate({name: functools.partial(c.time, calls) for name, c in candidates.items()}, BLOCKS)
    times = {name: summarize(block_ms)["step_ms"] for name, block_ms in samples.items()}
    row = {
        "model": name, "batch_size": batch_size, "precision": precision, "mode": mode, **times,
        "folded / frozen": times["folded"] / times["frozen"], "folded / plain": times["folded"] / times["plain"],
        "folded_mib": sum(event.folded_mib or 0 for event in folded.recorder.events_of("infer", "fold")),
        "check_us": check_us(folded), "refresh_ms": refresh_ms(folded),
    }  # fmt: skip
    for candidate in (eager, folded):
        change_weights(candidate.module)
    row["difference"] = relative_error(folded.step().clone(), eager.step())
    for candidate in candidates.values():
        candidate.close()
    return row


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--models", nargs="+", default=["resnet50", "vit_b_16", "convnext_tiny", "timm/efficientnet_b0"])
    add("--batch-sizes", nargs="+", type=int, default=[1, 16, 128])
    add("--precisions", nargs="+", choices=["bf16", "fp32"], default=["bf16", "fp32"])
    add("--modes", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    add("--image-size", type=int, default=224)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.device == "cpu":
        args.modes = ["default"]  # CUDA graphs need a GPU
    works = [
        (name, batch_size, precision, mode)
        for name in args.models for batch_size in args.batch_sizes
        for precision in args.precisions for mode in args.modes
    ]  # fmt: skip
    rows = []
    for work in works:
        rows.append(measure(*work, args))
        say(str(rows[-1]))
        save(args.json, "Weight folding", rows)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
