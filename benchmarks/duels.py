"""Ways to train a model, timed in one process in alternating blocks: eager, compiled by hand, and this library.

A block is a `Trainer.fit` of some steps, timed after its first steps. The blocks of all ways alternate, in both orders,
and each pair of blocks gives one ratio, so that drift between rounds does not change the median ratio. The way "graph
of the step" is no Trainer: it is a CUDA graph of forward pass, backward pass and fused optimizer, the least time that
launching the same kernels can take.

python benchmarks/duels.py --model resnet50 --batch-size 16 [--pairs 10] [--ways eager bare ...] [--json FILE]
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from models import make
from tables import (
    Row,
    compare_pairs,
    find,
    parser_for,
    print_columns,
    print_table,
    save,
    say,
    summarize,
    tried,
    with_interval,
)
from torch import nn
from trainer import BlockClock, Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile

WAYS = {
    "eager": "eager",
    "default": "net.compile()",
    "reduce-overhead": 'net.compile(mode="reduce-overhead")',
    "bare": "InductorCompile()",
    "auto": 'InductorCompile("auto")',
    "graph": "graph of the step",
}
MODES = {"bare": (), "auto": ("auto",)}
COMPARED = "eager", "default", "reduce-overhead", "bare"
COLUMNS = {"model": "{}", "batch_size": "{}", "way": "{}", "mode": "{}", "step_ms": "{:.3f}"}
COLUMNS |= {f"over_{way}": "{}" for way in COMPARED}
WARM_UP_STEPS = 8  # of a block; the first ones allocate the optimizer's state and may record a CUDA graph
RUN_STEPS = 15_000  # the announced length of each run, with which the callback plans


class EndsEarly(Classifier):
    """Ends a run after some steps, and leaves its weights on the GPU, because torch records their addresses."""

    last = 0

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.last else None  # which ends the epoch

    def cpu(self):
        return self


class Block(BlockClock):
    """Times the last steps of a run."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx in (self.block, pl_module.last):
            self.mark()


class Way:
    """A way to train, whose compiled code remains from block to block."""

    def __init__(self, way: str, args: Any) -> None:
        net, inputs, labels = make(args.model, args.batch_size, args.image_size, args.device)
        self.device, self.batches = args.device, loader([(inputs, labels)], RUN_STEPS)
        self.callback = InductorCompile(*MODES[way]) if way in MODES else None
        if way in ("default", "reduce-overhead"):
            net.compile(mode=None if way == "default" else way)
        self.module = EndsEarly(net)

    def run(self, warm_up_steps: int, steps: int) -> float:
        """Run a block, and return the milliseconds of a step."""
        self.module.last, block = warm_up_steps + steps, Block(warm_up_steps)
        callbacks = [block] if self.callback is None else [block, self.callback]
        make_trainer(self.device, *callbacks, num_sanity_val_steps=0).fit(self.module, self.batches)
        return (block.marks[1] - block.marks[0]) / steps * 1000

    @property
    def has_chosen(self) -> bool:
        trials = self.callback.report.train.diagnostics.trials if self.callback else ()
        return not trials or any(trial["verdict"] == "chosen" for trial in trials)


class GraphOfStep:
    """The CUDA graph of a training step."""

    callback, has_chosen = None, True

    def __init__(self, args: Any) -> None:
        net, inputs, labels = make(args.model, args.batch_size, args.image_size, args.device)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, fused=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = nn.functional.cross_entropy(compiled(inputs), labels)
            loss.backward()
            optimizer.step()

        self.used = net, optimizer, inputs, labels  # the graph has their addresses only
        compiled, self.graph, stream = torch.compile(net), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(4):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            step()

    def run(self, warm_up_steps: int, steps: int) -> float:
        """Replay the graph, and return the milliseconds of a step."""
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            self.graph.replay()
        synchronize()
        return (time.perf_counter() - began) / steps * 1000


def prepared(args: Any) -> dict[str, Any]:
    """The ways, compiled."""
    ways: dict[str, Any] = {}
    for name in args.ways:
        began = time.perf_counter()
        way = ways[name] = GraphOfStep(args) if name == "graph" else Way(name, args)
        way.run(WARM_UP_STEPS, 30)  # more than the eager steps of the callback
        while not way.has_chosen:
            way.run(1, args.prepare_steps)
        say(f"{args.model}, batch {args.batch_size}: {name} is ready after {time.perf_counter() - began:.0f} s")
    return ways


def rows_of(ways: Mapping[str, Any], block_ms: Mapping[str, list[float]]) -> Iterator[Row]:
    """The row of each way."""
    for name, values in block_ms.items():
        row = {"way": WAYS[name], "mode": "", **summarize(values), "block_ms": values}
        if (callback := ways[name].callback) is not None:
            train = callback.report.train
            row |= {"mode": train.mode, "trials": list(train.diagnostics.trials)}
        yield row


def with_speedups(rows: list[Row]) -> list[Row]:
    """The rows, with the speedups of each over the other ways of its workload."""
    for row in rows:
        for name in COMPARED:
            other = find(rows, WAYS[name], model=row["model"], batch_size=row["batch_size"])
            if other and other is not row:
                row[f"over_{name}"] = with_interval(compare_pairs(other, row))
    return rows


def show(rows: list[Row]) -> None:
    """Print the rows, and what "auto" tried."""
    print_columns(COLUMNS, with_speedups(rows))
    lines = [
        [row["model"], str(row["batch_size"]), row["mode"], tried(row)] for row in rows if row["way"] == WAYS["auto"]
    ]
    if lines:
        print_table(["model", "batch size", '"auto" chose', "tried"], lines)


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a name of models.py")
    add("--batch-size", type=int, default=32)
    add("--image-size", type=int, default=224)
    add("--pairs", type=int, default=10, help="number of blocks of each way")
    add("--block-steps", type=int, default=20)
    add("--prepare-steps", type=int, default=360, help="steps of the callback first; it times half of its first 300")
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "default", "reduce-overhead", "bare"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("high")
    ways = prepared(args)
    block_ms: dict[str, list[float]] = {name: [] for name in ways}
    for name in MODES.keys() & ways.keys():
        ways[name].run(1, args.prepare_steps)
    for number in range(args.pairs):
        for name in reversed(ways) if number % 2 else ways:
            block_ms[name].append(ways[name].run(WARM_UP_STEPS, args.block_steps))
    rows = [{"model": args.model, "batch_size": args.batch_size} | row for row in rows_of(ways, block_ms)]
    save(args.json, f"{args.model}, batch {args.batch_size}, ways that alternate in one process", rows)
    show(rows)


if __name__ == "__main__":
    main()
