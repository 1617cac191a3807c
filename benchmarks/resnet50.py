"""ResNet-50 in Lightning: eager, compiled by hand, Lightning's own torch.compile(module), and this library.

Each way is a process. The ways of a phase and batch size prepare one after another; then they are timed in alternating
blocks of steps with nothing else running. A cell is the median of the blocks in milliseconds a step. A "bare loop" runs
in one context of `no_grad` and autocast. "auto" chooses for a run of --train-run-steps or --infer-run-steps steps, and
is timed after its choice. On a GPU everything runs in bf16 autocast.

python benchmarks/resnet50.py [--phase both] [--batch-sizes 1 16 128] [--modes default reduce-overhead] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from harness import Group, Variant, Workload, add_pacing, rows_of
from tables import Row, find, in_order, ms, parser_for, print_table, with_interval

FROZEN = {"mode": "reduce-overhead", "freezing": True}
FROZEN_OPTIONS = {"triton.cudagraphs": True, "freezing": True}  # the same for torch.compile
AUTO = 'InductorCompile("auto")'


def train_ways(modes: list[str]) -> Iterator[Variant]:
    yield Variant(AUTO, "fit", "callback", "auto")
    yield Variant("eager", "fit")
    yield from (Variant(f"child compiled by hand, {mode}", "fit", "child", mode) for mode in modes)
    yield Variant("Lightning's torch.compile(module)", "fit", "module")
    yield from (Variant(f'InductorCompile("{mode}")', "fit", "callback", mode) for mode in modes)
    name = f'InductorCompile("{modes[-1]}"), TritonMaxPoolBackward'
    yield Variant(name, "fit", "callback", modes[-1], max_pool_pass=True)


def infer_ways(modes: list[str]) -> Iterator[Variant]:
    yield Variant(f"predict, {AUTO}", "predict", "callback", "auto")
    yield Variant("eager", "bare")
    yield Variant("predict, eager", "predict")
    yield from (Variant(f"bare loop, torch.compile, {mode}", "bare", "child", mode) for mode in modes)
    yield Variant("bare loop, reduce-overhead, frozen by hand", "bare", "child", FROZEN_OPTIONS)
    yield Variant("InductorBackend, reduce-overhead, frozen", "backend", "callback", FROZEN)
    yield Variant("predict, reduce-overhead, frozen by hand", "predict", "child", FROZEN_OPTIONS)
    yield Variant("predict, InductorCompile, reduce-overhead, frozen", "predict", "callback", FROZEN)


def groups(args: argparse.Namespace) -> Iterator[Group]:
    for phase in ["train", "infer"] if args.phase == "both" else [args.phase]:
        run_steps_of = args.train_run_steps if phase == "train" else args.infer_run_steps
        for number, batch_size in enumerate(args.batch_sizes):
            run_steps = run_steps_of[min(number, len(run_steps_of) - 1)]
            work = Workload(args.model, phase, batch_size, args.image_size, args.device, run_steps)
            ways = train_ways(args.modes) if phase == "train" else infer_ways(args.modes)
            yield work, [way for way in ways if not args.ways or any(part in way.name for part in args.ways)]


def show(rows: list[Row]) -> None:
    for phase in in_order(rows, lambda row: row["phase"]):
        of_phase = [row for row in rows if row["phase"] == phase]
        sizes = sorted(in_order(of_phase, lambda row: row["batch_size"]))
        lines = []
        # The row of "auto" is the last one.
        for way in sorted(in_order(of_phase, lambda row: row["way"]), key=lambda way: "auto" in way):
            found = [find(of_phase, way, batch_size=size) for size in sizes]
            cells = [[ms(row["step_ms"]), with_interval(row)] if row else ["", ""] for row in found]
            lines.append([way, *(cell for pair in cells for cell in pair)])
        heads = ((f"batch {size}, ms", "speedup (95% interval)") for size in sizes)
        print_table([phase, *(cell for pair in heads for cell in pair)], lines)
        show_auto(of_phase, sizes)


def show_auto(rows: list[Row], sizes: list[int]) -> None:
    """What "auto" chose, after how long, and its time relative to the best other way in the same loop."""
    lines = []
    for auto in (row for size in sizes for row in rows if row["batch_size"] == size and row.get("trials")):
        loop = "predict" if auto["phase"] == "infer" else ""
        others = [
            row for row in rows
            if row["batch_size"] == auto["batch_size"] and row is not auto and row["step_ms"]
            and row["way"].startswith(loop)
        ]  # fmt: skip
        best = min(others, key=lambda row: row["step_ms"], default=None)
        tried = "; ".join(
            f"{trial['candidate']} {trial['verdict']}" + (f" {trial['median_ms']:.2f} ms" if trial["median_ms"] else "")
            for trial in auto["trials"]
        )
        line = [str(auto["batch_size"]), auto["chosen"] or "nothing", tried, f"{auto['prepare_seconds']:.0f} s"]
        compared = [best["way"], f"{auto['step_ms'] / best['step_ms']:.3f}"] if best and auto["step_ms"] else ["", ""]
        lines.append(line + compared)
    if lines:
        print_table(["batch", '"auto" chose', "tried", "chosen after", "the best other", "its time of that"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    add = parser.add_argument
    add("--phase", choices=["train", "infer", "both"], default="both")
    add("--batch-sizes", type=int, nargs="+", default=[1, 16, 128])
    add("--modes", nargs="+", default=["default", "reduce-overhead"])
    add("--ways", nargs="+", metavar="PART", help="only the ways whose names contain one of these")
    add("--model", default="resnet50", help="another torchvision model")
    add("--image-size", type=int, default=224)
    steps = "announced steps of the run, one number for each batch size; the last one for all others"
    add("--train-run-steps", type=int, nargs="+", default=[15_000], help=steps)
    add("--infer-run-steps", type=int, nargs="+", default=[100_000, 100_000, 15_000], help=steps)
    args = parser.parse_args()
    show(rows_of(args, f"{args.model}, {args.phase}", groups(args)))


if __name__ == "__main__":
    main()
