"""Ways to train a model, timed in one process in alternating blocks: eager, compiled by hand, and the bare line.

Each way is a Trainer in its own thread, and one thread runs at a time. Each pair of blocks gives one ratio, so that a
machine that becomes faster or slower favors no way. The way "graph of the step" is no Trainer: it is a CUDA graph of
forward pass, backward pass and fused optimizer, the least time that launching the same kernels can take.

python benchmarks/duels.py --model resnet50 --batch-size 16 [--pairs 12] [--ways eager bare ...] [--json FILE]
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from models import make
from tables import Row, alternate, compare_blocks, parser_for, print_columns, save, say, summarize, with_interval
from torch import nn
from trainer import Classifier, make_trainer, synchronize

from compile_callbacks import InductorCompile

WAYS = {
    "eager": "eager",
    "default": "net.compile()",
    "reduce-overhead": 'net.compile(mode="reduce-overhead")',
    "bare": "InductorCompile()",
    "graph": "graph of the step",
}


class Turns:
    """The batches of one way, which wait for its turn before each block."""

    def __init__(self, batch: Any, args: Any) -> None:
        self.batch, self.prepare, self.pairs, self.block = batch, args.prepare_steps, args.pairs, args.block_steps
        self.turn, self.ready = threading.Semaphore(0), threading.Semaphore(0)
        self.block_ms = 0.0

    def __len__(self) -> int:
        return self.prepare + self.pairs * self.block

    def __iter__(self) -> Iterator[Any]:
        for steps in (self.prepare, *[self.block] * self.pairs):
            self.turn.acquire()
            synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                yield self.batch
            synchronize()
            self.block_ms = (time.perf_counter() - began) / steps * 1000
            self.ready.release()

    def run_block(self) -> float:
        """Let the way run its next block, and return the milliseconds of a step."""
        self.turn.release()
        self.ready.acquire()
        return self.block_ms


def trainer_way(way: str, args: Any) -> tuple[Callable[[], float], list[Any]]:
    """Start the Trainer of a way, and return what runs its next block, and its callbacks."""
    net, *batch = make(args.model, args.batch_size, args.image_size, args.device)
    if way in ("default", "reduce-overhead"):
        net.compile(mode=None if way == "default" else way)
    callbacks = [InductorCompile()] if way == "bare" else []
    turns, module = Turns(batch, args), Classifier(net)
    trainer = make_trainer(args.device, *callbacks, num_sanity_val_steps=0)

    def fit() -> None:
        try:
            trainer.fit(module, turns)
        finally:
            turns.ready.release()  # after an error, too

    threading.Thread(target=fit, name=way, daemon=True).start()
    return turns.run_block, callbacks


def graph_way(args: Any) -> Callable[[], float]:
    """Record the CUDA graph of a training step, and return what replays it for a block."""
    net, inputs, labels = make(args.model, args.batch_size, args.image_size, args.device)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(compiled(inputs), labels)
        loss.backward()
        optimizer.step()

    compiled, graph, stream = torch.compile(net), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()

    def run_block() -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(args.block_steps):
            graph.replay()
        synchronize()
        return (time.perf_counter() - began) / args.block_steps * 1000

    return run_block


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a name of models.py")
    add("--batch-size", type=int, default=32)
    add("--image-size", type=int, default=224)
    add("--pairs", type=int, default=12, help="number of blocks of each way")
    add("--block-steps", type=int, default=20)
    add("--prepare-steps", type=int, default=330, help="untimed steps; the callback times most of its first 300")
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "default", "reduce-overhead", "bare"])
    args = parser.parse_args()
    timers: dict[str, Callable[[], float]] = {}
    modes: dict[str, str] = {}
    for way in args.ways:
        began = time.perf_counter()
        timers[way], callbacks = (graph_way(args), []) if way == "graph" else trainer_way(way, args)
        timers[way]()  # the steps that prepare
        modes[way] = callbacks[0].report.train.mode if callbacks else ""
        say(f"{args.model}, batch {args.batch_size}: {way} is ready after {time.perf_counter() - began:.0f} s")
    blocks = alternate(timers, args.pairs)
    rows: list[Row] = []
    for way, block_ms in blocks.items():
        row = {"model": args.model, "batch_size": args.batch_size, "way": WAYS[way], "mode": modes[way]}
        row |= summarize(block_ms) | {"block_ms": block_ms}
        for other in ("eager", "default", "reduce-overhead"):
            if other in blocks and other != way:
                row[f"over_{other}"] = with_interval(compare_blocks(blocks[other], block_ms))
        rows.append(row)
    save(args.json, f"{args.model}, batch {args.batch_size}, ways that alternate in one process", rows)
    columns = {"way": "{}", "mode": "{}", "step_ms": "{:.3f}", "over_eager": "{}", "over_default": "{}"}
    print_columns(columns | {"over_reduce-overhead": "{}"}, rows)


if __name__ == "__main__":
    main()
