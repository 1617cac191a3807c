"""Compile time and step time of training steps in a Trainer, against depth and against batch size.

Depth: transformers of 12 to 96 narrow layers (width 256, 128 tokens), eager, compiled as a whole, and with the repeated
layer compiled once. Batch size: one model from 1 to 256. Each way is a process with an empty cache, and --jobs of them
compile at the same time; blocks of steps alternate with nothing else running. "first step" is the time of the first
training step with compiling, "compiling" the time that torch compiled before the timed steps, "step" the median of the
blocks.

python benchmarks/scaling.py [--against depth batch] [--depths 12 24 48 96] [--batch-sizes 1 4 16 64 256]
                             [--model resnet18] [--ways eager whole repeated] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from conduct import Group, Way, Work
from tables import Row, add_pacing, ms, parser_for, print_table, rows_of, times

WAYS = {
    "eager": Way("eager", "fit"),
    "whole": Way("whole", "fit", "callback", "default"),
    "whole-cudagraphs": Way("whole-cudagraphs", "fit", "callback", "reduce-overhead"),
    "repeated": Way("repeated", "fit", "callback", "default", "repeated"),
    "repeated-cudagraphs": Way("repeated-cudagraphs", "fit", "callback", "reduce-overhead", "repeated"),
}
RUN_STEPS = 10_000


def groups(args: argparse.Namespace) -> Iterator[list[Group]]:
    if "depth" in args.against:
        yield [
            (Work(f"blocks-{depth}", "train", args.depth_batch_size, 224, args.device, RUN_STEPS), ways_of(args))
            for depth in sorted(args.depths, reverse=True)  # the deepest takes the longest to compile
        ]
    if "batch" in args.against:
        ways = [way for way in ways_of(args) if not way.targets or args.model.startswith("blocks")]
        yield [
            (Work(args.model, "train", batch_size, args.image_size, args.device, RUN_STEPS), ways)
            for batch_size in args.batch_sizes
        ]


def ways_of(args: argparse.Namespace) -> list[Way]:
    return [WAYS[name] for name in args.ways]


def show(rows: list[Row]) -> None:
    rows = sorted(rows, key=lambda row: (not row["model"].startswith("blocks"), len(row["model"]), row["model"]))
    lines = []
    for row in rows:
        seconds = [row.get("first_step_seconds"), row.get("compile_seconds") if row["way"] != "eager" else None]
        cells = [f"{value:.1f}" if value else "" for value in seconds]
        lines.append([row["model"], str(row.get("batch_size", "")), row["way"], *cells])
        lines[-1] += [ms(row["step_ms"]), times(row["speedup"])]
    print_table(["model", "batch", "way", "first step s", "compiling s", "step ms", "of eager"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    add = parser.add_argument
    add("--against", nargs="+", choices=["depth", "batch"], default=["depth", "batch"])
    add("--depths", type=int, nargs="+", default=[12, 24, 48, 96])
    add("--depth-batch-size", type=int, default=8)
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    add("--model", default="resnet18", help="the model for the batch sizes: a torchvision model, or blocks-DEPTH")
    add("--image-size", type=int, default=224)
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "whole", "repeated"])
    args = parser.parse_args()
    show(rows_of(args, f"Training against {' and '.join(args.against)}", groups(args), own_caches=True))


if __name__ == "__main__":
    main()
