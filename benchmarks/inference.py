"""Inference of a ResNet-50: eager, compiled by hand and this library, in `Trainer.predict` and without a Trainer.

Each way is a process. The ways of a batch size prepare one after another; then they are timed in alternating blocks of
steps with nothing else running. A cell is the median of the blocks in milliseconds a step. A "bare loop" runs in one
context of `no_grad` and autocast. "auto" chooses for a run of --infer-run-steps steps, and is timed after its choice.
On a GPU everything runs in bf16 autocast.

python benchmarks/inference.py [--batch-sizes 1 16 128] [--ways eager frozen auto] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from harness import Group, Variant, Workload, add_pacing, rows_of
from tables import Row, find, in_order, ms, parser_for, print_table, tried, with_interval

FROZEN = {"mode": "reduce-overhead", "freezing": True}
FROZEN_OPTIONS = {"triton.cudagraphs": True, "freezing": True}  # the same for torch.compile
WAYS = (
    Variant('predict, InductorCompile("auto")', "predict", "callback", "auto"),
    Variant("eager", "bare"),
    Variant("predict, eager", "predict"),
    Variant("bare loop, reduce-overhead, frozen by hand", "bare", "hand", FROZEN_OPTIONS),
    Variant("InductorBackend, reduce-overhead, frozen", "backend", "callback", FROZEN),
    Variant("predict, reduce-overhead, frozen by hand", "predict", "hand", FROZEN_OPTIONS),
    Variant("predict, InductorCompile, reduce-overhead, frozen", "predict", "callback", FROZEN),
)


def groups(args: argparse.Namespace) -> Iterator[Group]:
    ways = [way for way in WAYS if not args.ways or any(part in way.name for part in args.ways)]
    for number, batch_size in enumerate(args.batch_sizes):
        run_steps = args.infer_run_steps[min(number, len(args.infer_run_steps) - 1)]
        yield Workload(args.model, batch_size, args.image_size, args.device, run_steps), ways


def show(rows: list[Row]) -> None:
    sizes = sorted(in_order(rows, lambda row: row["batch_size"]))
    lines = []
    # The row of "auto" is the last one.
    for way in sorted(in_order(rows, lambda row: row["way"]), key=lambda way: "auto" in way):
        found = [find(rows, way, batch_size=size) for size in sizes]
        cells = [[ms(row["step_ms"]), with_interval(row)] if row else ["", ""] for row in found]
        lines.append([way, *(cell for pair in cells for cell in pair)])
    heads = ((f"batch {size}, ms", "speedup (95% interval)") for size in sizes)
    print_table(["way", *(cell for pair in heads for cell in pair)], lines)
    show_auto(rows, sizes)


def show_auto(rows: list[Row], sizes: list[int]) -> None:
    """What "auto" chose, after how long, and its time relative to the best other way in `predict`."""
    lines = []
    for auto in (row for size in sizes for row in rows if row["batch_size"] == size and row.get("trials")):
        others = [
            row for row in rows
            if row["batch_size"] == auto["batch_size"] and row is not auto and row["step_ms"]
            and row["way"].startswith("predict")
        ]  # fmt: skip
        best = min(others, key=lambda row: row["step_ms"], default=None)
        line = [str(auto["batch_size"]), auto["chosen"] or "nothing", tried(auto), f"{auto['prepare_seconds']:.0f} s"]
        compared = [best["way"], f"{auto['step_ms'] / best['step_ms']:.3f}"] if best and auto["step_ms"] else ["", ""]
        lines.append(line + compared)
    if lines:
        print_table(["batch", '"auto" chose', "tried", "chosen after", "the best other", "its time of that"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 16, 128])
    add("--ways", nargs="+", metavar="PART", help="only the ways whose names contain one of these")
    add("--model", default="resnet50", help="another torchvision model")
    add("--image-size", type=int, default=224)
    steps = "announced steps of the run, one number for each batch size; the last one for all others"
    add("--infer-run-steps", type=int, nargs="+", default=[100_000, 100_000, 15_000], help=steps)
    args = parser.parse_args()
    show(rows_of(args, f"{args.model}, inference", groups(args)))


if __name__ == "__main__":
    main()
