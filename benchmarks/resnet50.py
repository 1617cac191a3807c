"""ResNet-50 in Lightning, bf16 autocast, channels_last: eager, compiled by hand, Lightning's own way, this library.

Each way is a process of its own; all of a phase and batch size prepare together and are then timed in blocks of steps
that alternate, with nothing else running. A cell is the median of the blocks, in milliseconds a step. Training steps
are those of a Trainer with fused SGD; "bare loop" calls the module under `no_grad` and autocast. "auto" is told of
--train-run-steps or --infer-run-steps steps, as in a run of that length, and timed after it has chosen.

python benchmarks/resnet50.py [--phase both] [--batch-sizes 1 16 128] [--modes default reduce-overhead]
                              [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from conduct import Group
from results import Row, find, in_order, ms, pacing, parser_for, print_environment, print_table, rows_of, step_ms, times
from work import Way, Work

FROZEN = {"mode": "reduce-overhead", "freezing": True}
FROZEN_OPTIONS = {"triton.cudagraphs": True, "freezing": True}  # the same for torch.compile
BF16 = {"autocast_enabled": True, "autocast_dtype": "bfloat16"}
AUTO = 'InductorCompile("auto")'
EAGER = "eager"


def train_ways(modes: list[str]) -> Iterator[Way]:
    yield Way(AUTO, "fit", "callback", "auto")  # the longest to prepare
    yield Way(EAGER, "fit")
    yield from (Way(f"child compiled by hand, {mode}", "fit", "child", mode) for mode in modes)
    yield Way("Lightning's torch.compile(module)", "fit", "module")
    yield from (Way(f"InductorCompile({mode!r})".replace("'", '"'), "fit", "callback", mode) for mode in modes)
    kernel = "TritonMaxPoolBackward"
    yield Way(f'InductorCompile("{modes[-1]}"), {kernel}', "fit", "callback", modes[-1], passes=(kernel,))


def infer_ways(modes: list[str], device: str) -> Iterator[Way]:
    yield Way(f"predict, {AUTO}", "predict", "callback", "auto")
    yield Way(EAGER, "bare")
    yield Way("predict, eager", "predict")
    yield from (Way(f"bare loop, torch.compile, {mode}", "bare", "child", mode) for mode in modes)
    yield Way("bare loop, reduce-overhead, frozen by hand", "bare", "child", FROZEN_OPTIONS)
    autocast = BF16 if device == "cuda" else {}
    yield Way("InductorBackend, reduce-overhead, frozen", "backend", "callback", FROZEN | autocast)
    yield Way("predict, InductorCompile, reduce-overhead, frozen", "predict", "callback", FROZEN)


def groups(args: argparse.Namespace) -> Iterator[list[Group]]:
    for phase in ["train", "infer"] if args.phase == "both" else [args.phase]:
        told = args.train_run_steps if phase == "train" else args.infer_run_steps
        batch: list[Group] = []
        for number, batch_size in enumerate(args.batch_sizes):
            run_steps = told[min(number, len(told) - 1)]
            work = Work(args.model, phase, batch_size, args.image_size, args.device, run_steps)
            ways = train_ways(args.modes) if phase == "train" else infer_ways(args.modes, args.device)
            batch.append((work, [way for way in ways if not args.ways or any(part in way.name for part in args.ways)]))
        for start in range(0, len(batch), args.together):
            yield batch[start : start + args.together]


def show(rows: list[Row]) -> None:
    for phase in in_order(rows, lambda row: row["phase"]):
        of_phase = [row for row in rows if row["phase"] == phase]
        sizes = sorted(in_order(of_phase, lambda row: row["batch_size"]))
        head = [phase] + [cell for size in sizes for cell in (f"batch {size}", "of eager")]
        lines = []
        for way in sorted(in_order(of_phase, lambda row: row["way"]), key=lambda way: "auto" in way):
            line = [way]
            for size in sizes:
                milliseconds = step_ms(of_phase, way, batch_size=size)
                eager = step_ms(of_phase, EAGER, batch_size=size)
                known = find(of_phase, way, batch_size=size) is not None
                line += [ms(milliseconds) if known else "", times(milliseconds, eager) if way != EAGER else ""]
            lines.append(line)
        print_table(head, lines)
        show_auto(of_phase, sizes)
    print_environment(rows)


def show_auto(rows: list[Row], sizes: list[int]) -> None:
    """What "auto" chose, how long it took to, and how far it is from the best of all ways that run in its loop."""
    lines = []
    for size in sizes:
        auto = next((r for r in rows if "auto" in r["way"] and r["batch_size"] == size and r["step_ms"]), None)
        if auto is None:
            continue
        loop = "predict" if auto["phase"] == "infer" else ""
        others = [
            r for r in rows
            if r["batch_size"] == size and r is not auto and r["step_ms"] and r["way"].startswith(loop)
        ]  # fmt: skip
        best = min(others, key=lambda row: row["step_ms"], default=None)
        tried = "; ".join(
            f"{t['candidate']} {t['verdict']}" + (f" {t['median_ms']:.2f} ms" if t["median_ms"] else "")
            for t in auto["trials"]
        )
        lines.append([str(size), auto["chosen"] or "nothing", tried, f"{auto['prepare_seconds']:.0f} s"])
        lines[-1] += [best["way"], f"{auto['step_ms'] / best['step_ms']:.3f}"] if best else ["", ""]
    if lines:
        print_table(["batch", '"auto" chose', "tried", "chosen after", "the best other", "its time of that"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--phase", choices=["train", "infer", "both"], default="both")
    add("--batch-sizes", type=int, nargs="+", default=[1, 16, 128])
    add("--modes", nargs="+", default=["default", "reduce-overhead"])
    add("--ways", nargs="+", metavar="PART", help="only the ways whose names have one of these in them")
    add("--model", default="resnet50", help="another one of torchvision's")
    add("--image-size", type=int, default=224)
    steps = "steps of the run that the trainer is told of, for each batch size; the last for those after it"
    add("--train-run-steps", type=int, nargs="+", default=[15_000], help=steps)
    add("--infer-run-steps", type=int, nargs="+", default=[100_000, 100_000, 15_000], help=steps)
    add("--together", type=int, default=1, help="batch sizes that prepare at once")
    args = parser.parse_args()
    show(rows_of(args, groups(args), pacing(args)))


if __name__ == "__main__":
    main()
