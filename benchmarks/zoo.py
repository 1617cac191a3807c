"""Models of torchvision and timm, training and inference: eager, `torch.compile` by hand, and this library's "auto".

Training steps are those of `Trainer.fit` with fused SGD, inference is `Trainer.predict`; both in bf16 under autocast
on a GPU, images and weights channels last. "torch.compile" is the net compiled by hand in the same loop, default mode.
Each way is a process of its own; blocks of steps alternate, with nothing else running, and a cell is the median of its
blocks, in milliseconds a step. "auto" is told of --train-run-steps or --infer-run-steps steps and timed after it has
chosen.

python benchmarks/zoo.py [--phase both] [--models resnet18 timm/mixer_b16_224 ...] [--batch-size 16] [--together 4]
                         [--device cuda] [--json FILE]
python benchmarks/zoo.py --from-json FILE ...    the table of what several calls measured
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from conduct import Group
from results import (
    Row,
    find,
    geometric_mean,
    in_order,
    ms,
    pacing,
    parser_for,
    print_environment,
    print_table,
    rows_of,
    times,
)
from work import Way, Work

MODELS = [
    "resnet18", "resnet50", "resnext50_32x4d", "regnet_y_800mf", "shufflenet_v2_x1_0",
    "mobilenet_v3_large", "efficientnet_b0", "convnext_tiny", "vit_b_16", "swin_t",
    "timm/deit_small_patch16_224", "timm/mixer_b16_224", "timm/resmlp_12_224",
]  # fmt: skip

EAGER, BY_HAND, AUTO = "eager", "torch.compile", "auto"


def groups(args: argparse.Namespace) -> Iterator[list[Group]]:
    batch: list[Group] = []
    for phase in ["train", "infer"] if args.phase == "both" else [args.phase]:
        loop = "fit" if phase == "train" else "predict"
        ways = [Way(AUTO, loop, "callback", "auto"), Way(BY_HAND, loop, "child", "default"), Way(EAGER, loop)]
        run_steps = args.train_run_steps if phase == "train" else args.infer_run_steps
        batch += [
            (Work(model, phase, args.batch_size, args.image_size, args.device, run_steps), ways)
            for model in args.models
        ]
    for start in range(0, len(batch), args.together):
        yield batch[start : start + args.together]


def show(rows: list[Row]) -> None:
    for phase in in_order(rows, lambda row: row["phase"]):
        show_phase([row for row in rows if row["phase"] == phase], phase)
    print_environment(rows)


def show_phase(rows: list[Row], phase: str) -> None:
    lines, over_eager, over_by_hand = [], {}, {}
    for model in in_order(rows, lambda row: row["model"]):
        eager, by_hand, auto = (find(rows, way, model=model) or {"step_ms": None} for way in (EAGER, BY_HAND, AUTO))
        if auto["step_ms"] and eager["step_ms"]:
            over_eager[model] = eager["step_ms"] / auto["step_ms"]
        if auto["step_ms"] and by_hand["step_ms"]:
            over_by_hand[model] = by_hand["step_ms"] / auto["step_ms"]
        lines.append(
            [model, *(ms(row["step_ms"]) for row in (eager, by_hand, auto)), auto.get("chosen") or "nothing"]
            + [times(auto["step_ms"], other["step_ms"]) for other in (eager, by_hand)]
            + [times(by_hand["step_ms"], eager["step_ms"])]
        )
    sizes = ", ".join(str(size) for size in in_order(rows, lambda row: row["batch_size"]))
    head = [f"{phase}, batch {sizes}", "eager ms", "torch.compile ms", '"auto" ms', '"auto" chose']
    head += ['"auto" over eager', '"auto" over torch.compile', "torch.compile over eager"]
    if over_eager and over_by_hand:
        plain = [over_eager[model] / over_by_hand[model] for model in over_eager if model in over_by_hand]
        ratios = [list(over_eager.values()), list(over_by_hand.values()), plain]
        for name, of in ((f"geometric mean of {len(over_eager)}", geometric_mean), ("worst", min)):
            lines.append([name, "", "", "", "", *(f"{of(values):.2f}×" for values in ratios)])
    print_table(head, lines)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--phase", choices=["train", "infer", "both"], default="both")
    add("--models", nargs="+", default=MODELS, help="names of torchvision's, or timm/NAME")
    add("--batch-size", type=int, default=16)
    add("--image-size", type=int, help="height and width (default: what the model is made for)")
    add("--train-run-steps", type=int, default=15_000)
    add("--infer-run-steps", type=int, default=100_000)
    add("--together", type=int, default=4, help="models that prepare at once, three processes each")
    args = parser.parse_args()
    show(rows_of(args, groups(args), pacing(args)))


if __name__ == "__main__":
    main()
