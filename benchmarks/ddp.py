"""ResNet-50 training in Lightning on one GPU and on several under DDP: eager, and compiled in whole and split graphs.

Each number of GPUs is a run of one process for each GPU, in which the ways follow one another:

- eager: without the callback;
- whole: `InductorCompile`; DDP reduces the gradients after the backward pass;
- split: the same with `torch._dynamo.config.optimize_ddp = "ddp_optimizer"`: Dynamo splits graphs at DDP's buckets, so
  that DDP reduces gradients while the remaining backward graphs run.

Every process has the same batch on its device in each step. Times are medians of blocks of steps, synchronized at both
ends. "speedup_over_one_gpu" is the ratio of images per second.

python benchmarks/ddp.py [--gpus 1 2] [--batch-size 256] [--steps 80] [--mode default] [--json FILE]
python benchmarks/ddp.py --device cpu --model resnet18 --batch-size 2 --image-size 32 --steps 4 --block 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from lightning.pytorch.strategies import DDPStrategy
from models import make
from tables import Row, parser_for, print_columns, save, say
from trainer import BlockClock, Classifier, loader, make_trainer

from compile_callbacks import InductorCompile
from compile_callbacks.cli.bench_measure import summarize
from compile_callbacks.report.file import environment

WAYS = ("eager", "whole", "split")
COLUMNS = {
    "gpus": "{}", "batch_size": "{}", "way": "{}", "step_ms": "{:.2f}", "images_per_second": "{:.0f}",
    "speedup_over_one_gpu": "{:.2f}x", "compile_seconds": "{:.1f}", "graphs": "{}",
}  # fmt: skip


def train(way: str, args: argparse.Namespace) -> Row:
    """One fit in this process, which is one of ``args.world``."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = "ddp_optimizer" if way == "split" else True
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else "cpu"
    net, images, labels = make(args.model, args.batch_size, args.image_size, device)
    clock, callback = BlockClock(args.block), InductorCompile(args.mode, None, baseline_steps=0, verify="off")
    callbacks = [clock] if way == "eager" else [callback, clock]
    strategy = DDPStrategy(gradient_as_bucket_view=True) if args.world > 1 else "auto"
    trainer = make_trainer(args.device, *callbacks, devices=args.world, strategy=strategy)
    trainer.fit(Classifier(net), loader((images, labels), args.steps))
    row = {"model": args.model, "phase": "train", "gpus": args.world, "batch_size": args.batch_size, "way": way}
    row |= summarize(clock.block_ms[len(clock.block_ms) // 2 :])  # compiles are in the first half
    row["images_per_second"] = args.batch_size * args.world / row["step_ms"] * 1000
    if way != "eager":
        report = callback.report.train
        failures = [event["reason"] for event in report.diagnostics.events if event["kind"] == "fallback"]
        row |= {"compile_seconds": report.compile_seconds, "graphs": report.graphs, "failures": failures}
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return row


def run(args: argparse.Namespace) -> None:
    """All ways in this process; the first process writes the rows."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    rows = []
    for way in args.ways:
        if args.world > 1 or way != "split":  # without DDP nothing is split
            rows.append(train(way, args))
            if os.environ["LOCAL_RANK"] == "0":
                say(str(rows[-1]))
    if os.environ["LOCAL_RANK"] == "0":
        args.rows.write_text(json.dumps({"rows": rows, "environment": environment()}))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--gpus", type=int, nargs="+", default=[1, 2])
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--model", default="resnet50")
    add("--mode", default="default")
    add("--batch-size", type=int, default=256, help="of each process")
    add("--image-size", type=int, default=224)
    add("--steps", type=int, default=80)
    add("--block", type=int, default=10, help="steps that are timed together")
    add("--world", type=int, help=argparse.SUPPRESS)
    add("--rows", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.world is not None:
        run(args)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for world in args.gpus:
            path = Path(folder, f"{world}.json")
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
            options = [*sys.argv[1:], "--world", str(world), "--rows", str(path)]
            subprocess.run([sys.executable, *torchrun, __file__, *options], stdout=subprocess.DEVNULL, check=True)
            measured = json.loads(path.read_text())
            rows += measured["rows"]
            for row in measured["rows"]:
                way = "whole" if row["way"] == "split" else row["way"]
                one = next((r for r in rows if (r["gpus"], r["way"]) == (1, way) and world > 1), None)
                row["speedup_over_one_gpu"] = one and row["images_per_second"] / one["images_per_second"]
            save(args.json, f"{args.model} under DDP, mode {args.mode}", rows, measured["environment"])
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
