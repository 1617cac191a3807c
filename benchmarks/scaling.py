"""Compile time and step time against depth, and against batch size: training steps in a Trainer.

Depth: transformers of 12 to 96 narrow layers (width 256, 128 tokens), eager, compiled whole, and with the layer that
repeats compiled once. Batch size: one model from 1 to 256. Each way is a process of its own with an empty cache, and
--jobs of them compile at once, on as many cores each as that leaves; steps are timed in blocks that alternate, with
nothing else running. "first step" is the time of the first training step, compiling included; "compiling" is what of
the time before the timed steps torch spent compiling; "step" the median of the blocks.

python benchmarks/scaling.py [--against depth batch] [--depths 12 24 48 96] [--batch-sizes 1 4 16 64 256]
                             [--model resnet18] [--ways eager whole repeated] [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from conduct import Group
from results import Row, find, in_order, ms, pacing, parser_for, print_environment, print_table, rows_of, times
from work import Way, Work

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
        # The deepest first: it takes the longest to compile.
        ways = [WAYS[name] for name in args.ways]
        yield [
            (Work(f"blocks-{depth}", "train", args.depth_batch_size, None, args.device, RUN_STEPS), ways)
            for depth in sorted(args.depths, reverse=True)
        ]
    if "batch" in args.against:
        ways = [WAYS[name] for name in args.ways if not name.startswith("repeated") or args.model.startswith("blocks")]
        yield [
            (Work(args.model, "train", batch_size, args.image_size, args.device, RUN_STEPS), ways)
            for batch_size in args.batch_sizes
        ]


def show(rows: list[Row]) -> None:
    works = in_order(rows, lambda row: (row["model"], row["batch_size"]))
    works.sort(key=lambda work: (not work[0].startswith("blocks"), len(work[0]), work))
    ways = in_order(rows, lambda row: row["way"])
    lines = []
    for model, batch_size in works:
        found = {way: find(rows, way, model=model, batch_size=batch_size) for way in ways}
        eager_ms = (found.get("eager") or {}).get("step_ms")
        for way, row in found.items():
            if row is None:
                continue
            compiled = way != "eager" and row["step_ms"] is not None
            line = [model, str(batch_size), way]
            line.append(f"{row['first_step_seconds']:.1f}" if row.get("first_step_seconds") else "")
            line.append(f"{row['compile_seconds']:.1f}" if compiled else "")
            line += [ms(row["step_ms"]), times(row["step_ms"], eager_ms) if compiled else ""]
            lines.append(line)
    print_table(["model", "batch", "way", "first step s", "compiling s", "step ms", "of eager"], lines)
    print_environment(rows)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--against", nargs="+", choices=["depth", "batch"], default=["depth", "batch"])
    add("--depths", type=int, nargs="+", default=[12, 24, 48, 96])
    add("--depth-batch-size", type=int, default=8)
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    add("--model", default="resnet18", help="for the batch sizes: one of torchvision's, or blocks-DEPTH")
    add("--image-size", type=int, default=224)
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "whole", "repeated"])
    args = parser.parse_args()
    show(rows_of(args, groups(args), pacing(args, own_caches=True)))


if __name__ == "__main__":
    main()
