"""Inference in one process in alternating blocks: eager, compiled by hand, and this library.

A block is a `Trainer.predict` of some steps, or a loop without a Trainer, timed after its first steps. Blocks of all
ways alternate, in both orders, and a speedup is the median ratio of the blocks of one round. On a GPU, everything runs
in bf16 autocast. A loop runs in one context of autocast, which keeps its casts of weights for the next call. The module
of a `Trainer.predict` is in train mode before each block, as after an ordinary run.

python benchmarks/inference.py [--model resnet50] [--batch-sizes 1 128] [--rounds 10] [--ways eager bare ...]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.config
from models import make
from tables import (
    Row,
    alternate,
    compare_pairs,
    find,
    in_order,
    ms,
    parser_for,
    print_table,
    save,
    say,
    summarize,
    tried,
    with_interval,
)
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorBackend, InductorCompile

FROZEN = "CUDA graphs, frozen weights"
WAYS = {
    "eager": "predict, eager",
    "default": "predict, net.compile()",
    "reduce-overhead": 'predict, net.compile(mode="reduce-overhead")',
    "bare": "predict, InductorCompile()",
    "auto": 'predict, InductorCompile("auto")',
    "frozen by hand": f"predict, by hand, {FROZEN}",
    "frozen": f"predict, InductorCompile, {FROZEN}",
    "loop": f"loop, by hand, {FROZEN}",
    "backend": f"loop, InductorBackend, {FROZEN}",
}
MODES: dict[str, Any] = {"bare": "fast", "auto": "auto", "frozen": {"mode": "reduce-overhead", "freezing": True}}
BY_HAND = "frozen by hand", "loop"
WARM_UP_STEPS = 30  # of a block
PREPARE_STEPS = 360  # of the callback, which times half of its first 300 steps
BLOCK_SECONDS = 0.25
RUN_STEPS = 100_000  # the announced length of each run, with which "auto" plans


class Stays(Classifier):
    """Leaves its weights on the GPU after a run, because torch records their addresses."""

    def cpu(self):
        return self


class Done(Exception):  # noqa: N818
    """Ends a predict run, which Lightning cannot end early otherwise."""


class Block(pl.Callback):
    """Times the last steps of a run, and ends the run."""

    def __init__(self, warm_up_steps: int, steps: int) -> None:
        self.bounds = warm_up_steps, warm_up_steps + steps
        self.marks: list[float] = []

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx in self.bounds:
            synchronize()
            self.marks.append(time.perf_counter())
        if batch_idx == self.bounds[1]:
            raise Done


class Way:
    """A way to predict, whose compiled code remains from block to block."""

    def __init__(self, way: str, batch_size: int, args: argparse.Namespace) -> None:
        net, self.inputs, labels = make(args.model, batch_size, args.image_size, args.device)
        self.way, self.device, self.batches = way, args.device, loader([(self.inputs, labels)], RUN_STEPS)
        self.module, self.steps = Stays(net), 0
        self.call: Any = net.eval()
        self.callback = InductorCompile(None, MODES[way]) if way in MODES else None
        if way in ("default", "reduce-overhead"):
            net.compile(mode=None if way == "default" else way)
        if way in BY_HAND:
            net.compile(options={"triton.cudagraphs": args.device == "cuda", "freezing": True})
        if way == "backend":
            with self.autocast():
                self.call = InductorBackend(MODES["frozen"]).build(net, self.inputs, args.device).infer

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def prepare(self) -> None:
        """Compile, run more steps than the callback times one by one, and choose the number of steps of a block."""
        # torch freezes if this global is set during tracing; the option alone has no effect.
        torch._inductor.config.freezing = self.way in BY_HAND
        self.run(30, 30)
        torch._inductor.config.freezing = False
        while not self.has_chosen:
            self.run(1, 500)
        self.steps = max(20, round(BLOCK_SECONDS * 1000 / self.run(30, 30)))
        if self.callback is not None:
            self.run(1, PREPARE_STEPS)

    @property
    def has_chosen(self) -> bool:
        trials = self.callback.report.infer.diagnostics.trials if self.callback else ()
        return not trials or any(trial["verdict"] == "chosen" for trial in trials)

    def block(self) -> float:
        """Run a block, and return the milliseconds of a step."""
        return self.run(WARM_UP_STEPS, self.steps)

    def run(self, warm_up_steps: int, steps: int) -> float:
        block = Block(warm_up_steps, steps)
        if self.way in ("loop", "backend"):
            with torch.no_grad(), self.autocast(), contextlib.suppress(Done):
                for number in range(RUN_STEPS):
                    block.on_predict_batch_start(None, None, None, number)
                    torch.compiler.cudagraph_mark_step_begin()
                    self.call(self.inputs)
        else:
            callbacks = [block] if self.callback is None else [block, self.callback]
            # Lightning restores this mode after a run, but not after the exception that ends a block. The change of the
            # mode makes torch 2.11 check modules in full from then on, in code by hand, too.
            self.module.train()
            with contextlib.suppress(Done):
                make_trainer(self.device, *callbacks).predict(self.module, self.batches, return_predictions=False)
        return (block.marks[1] - block.marks[0]) / steps * 1000


def measure(batch_size: int, args: argparse.Namespace) -> Iterator[Row]:
    """Yield the rows of a batch size."""
    ways: dict[str, Way] = {}
    for name in args.ways:
        began = time.perf_counter()
        ways[name] = Way(name, batch_size, args)
        ways[name].prepare()
        say(f"{args.model}, batch {batch_size}: {name} is ready after {time.perf_counter() - began:.0f} s")
    block_ms = alternate({name: way.block for name, way in ways.items()}, args.rounds)
    for name, values in block_ms.items():
        row = {"model": args.model, "batch_size": batch_size, "way": WAYS[name], "mode": ""}
        row |= {**summarize(values), "block_ms": values, "trials": []}
        if (callback := ways[name].callback) is not None:
            infer = callback.report.infer
            row |= {"mode": infer.mode, "trials": list(infer.diagnostics.trials)}
        yield row


def show(rows: list[Row]) -> None:
    """Print the rows, and what "auto" tried."""
    sizes = in_order(rows, lambda row: row["batch_size"])
    lines = []
    for way in in_order(rows, lambda row: row["way"]):
        lines.append([way])
        for size in sizes:
            row, eager = (find(rows, name, batch_size=size) for name in (way, WAYS["eager"]))
            lines[-1] += [ms(row["step_ms"]), "" if row is eager else with_interval(compare_pairs(eager, row))]
    heads = ((f"batch {size}, ms", "over eager (95% interval)") for size in sizes)
    print_table(["way", *(cell for pair in heads for cell in pair)], lines)
    tries = [[str(row["batch_size"]), row["mode"], tried(row)] for row in rows if row["way"] == WAYS["auto"]]
    if tries:
        print_table(["batch size", '"auto" chose', "tried"], tries)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="a name of models.py")
    add("--batch-sizes", type=int, nargs="+", default=[1, 128])
    add("--image-size", type=int, default=224)
    add("--rounds", type=int, default=10, help="number of blocks of each way")
    add("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    rows: list[Row] = []
    for batch_size in args.batch_sizes:
        rows += measure(batch_size, args)
        save(args.json, f"{args.model}, inference", rows)
    show(rows)


if __name__ == "__main__":
    main()
