"""Models of torchvision and timm, training and inference: eager, `torch.compile` by hand, and "auto".

Training steps are those of `Trainer.fit` with fused SGD, inference is `Trainer.predict`; both run in bf16 autocast on a
GPU. "torch.compile" is the net compiled by hand in the same loop, default mode. Each way is a process; blocks of steps
alternate with nothing else running, and a cell is the median of its blocks in milliseconds a step. "auto" chooses for
a run of --train-run-steps or --infer-run-steps steps, and is timed after its choice.

python benchmarks/zoo.py [--phase both] [--models resnet18 timm/mixer_b16_224 ...] [--batch-size 16] [--together 4]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

from conduct import Group, Variant, Workload
from tables import Row, add_pacing, find, in_order, ms, parser_for, print_table, rows_of, times

MODELS = [
    "resnet18", "resnet50", "resnext50_32x4d", "regnet_y_800mf", "shufflenet_v2_x1_0",
    "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t",
    "timm/deit_small_patch16_224", "timm/mixer_b16_224", "timm/resmlp_12_224",
]  # fmt: skip


def groups(args: argparse.Namespace) -> Iterator[list[Group]]:
    batch: list[Group] = []
    for phase in ["train", "infer"] if args.phase == "both" else [args.phase]:
        loop = "fit" if phase == "train" else "predict"
        ways = [
            Variant("auto", loop, "callback", "auto"),
            Variant("torch.compile", loop, "child", "default"),
            Variant("eager", loop),
        ]
        run_steps = args.train_run_steps if phase == "train" else args.infer_run_steps
        batch += [
            (Workload(model, phase, args.batch_size, args.image_size, args.device, run_steps), ways)
            for model in args.models
        ]
    for start in range(0, len(batch), args.together):
        yield batch[start : start + args.together]


def show(rows: list[Row]) -> None:
    for phase in in_order(rows, lambda row: row["phase"]):
        show_phase([row for row in rows if row["phase"] == phase], phase)


def show_phase(rows: list[Row], phase: str) -> None:
    lines, ratios = [], []
    for model in in_order(rows, lambda row: row["model"]):
        eager, by_hand, auto = (find(rows, way, model=model) for way in ("eager", "torch.compile", "auto"))
        over_by_hand = auto.get("speedup_over_torch_compile")
        if over_by_hand is None and auto.get("step_ms") and by_hand.get("step_ms"):
            over_by_hand = by_hand["step_ms"] / auto["step_ms"]
        ratios.append((auto.get("speedup"), over_by_hand, by_hand.get("speedup")))
        milliseconds = [ms(row.get("step_ms")) for row in (eager, by_hand, auto)]
        lines.append([model, *milliseconds, auto.get("chosen") or "-", *map(times, ratios[-1])])
    complete = [of_model for of_model in ratios if None not in of_model]
    for name, mean in ((f"geometric mean of {len(complete)}", statistics.geometric_mean), ("worst", min)):
        if complete:
            lines.append([name, "", "", "", "", *(times(mean(column)) for column in zip(*complete, strict=True))])
    sizes = ", ".join(str(size) for size in in_order(rows, lambda row: row["batch_size"]))
    head = [f"{phase}, batch {sizes}", "eager ms", "torch.compile ms", '"auto" ms', '"auto" chose']
    print_table([*head, '"auto" over eager', '"auto" over torch.compile', "torch.compile over eager"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add_pacing(parser)
    add = parser.add_argument
    add("--phase", choices=["train", "infer", "both"], default="both")
    add("--models", nargs="+", default=MODELS, help="torchvision models, and timm models as timm/NAME")
    add("--batch-size", type=int, default=16)
    add("--image-size", type=int, default=224)
    add("--train-run-steps", type=int, default=15_000)
    add("--infer-run-steps", type=int, default=100_000)
    add("--together", type=int, default=4, help="number of models that prepare at the same time, three processes each")
    args = parser.parse_args()
    show(rows_of(args, f"Models of torchvision and timm, {args.phase}", groups(args)))


if __name__ == "__main__":
    main()
