"""Ways to train a model, timed in one process in alternating blocks: eager, compiled by hand, and the bare line.

Each way is a Trainer in its own thread, the bare line in the main thread, and one of them runs at a time. Each pair of
blocks gives one ratio, so that a machine that becomes faster or slower favors no way. The way "graph of the step" is no
Trainer: it is a CUDA graph of forward pass, backward pass and fused optimizer, the least time that launching the same
kernels can take.

python benchmarks/duels.py --model resnet50 --batch-size 16 [--pairs 12] [--ways eager graph ...] [--json FILE]
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from models import make
from tables import Row, compare_blocks, parser_for, print_columns, save, say, summarize, with_interval
from torch import nn
from torch._inductor import cudagraph_trees
from trainer import Classifier, make_trainer, synchronize

from compile_callbacks import InductorCompile

WAYS = {
    "eager": "eager",
    "default": "net.compile()",
    "reduce-overhead": 'net.compile(mode="reduce-overhead")',
    "graph": "graph of the step",
}
BARE = "InductorCompile()"
COLUMNS = {"model": "{}", "batch_size": "{}", "way": "{}", "mode": "{}", "step_ms": "{:.3f}", "over_eager": "{}",
           "over_default": "{}", "over_reduce-overhead": "{}"}  # fmt: skip


class Turns:
    """The batches of one way, which wait for its turn before each block."""

    def __init__(self, batch: Any, args: Any) -> None:
        self.batch, self.args = batch, args
        self.turn, self.ready = threading.Semaphore(0), threading.Semaphore(0)
        self.block_ms = 0.0

    def __len__(self) -> int:
        return self.args.prepare_steps + self.args.pairs * self.args.block_steps

    def __iter__(self) -> Iterator[Any]:
        for steps in (self.args.prepare_steps, *[self.args.block_steps] * self.args.pairs):
            self.turn.acquire()
            yield from self.block(steps)
            self.ready.release()

    def block(self, steps: int) -> Iterator[Any]:
        """Yield the batches of a block, and time their steps."""
        synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            yield self.batch
        synchronize()
        self.block_ms = (time.perf_counter() - began) / steps * 1000

    def run_block(self) -> float:
        """Let the way run its next block, and return the milliseconds of a step."""
        self.turn.release()
        self.ready.acquire()
        return self.block_ms


class Rounds(Turns):
    """The batches of the way in the main thread, which lets the other ways run their blocks before or after its own."""

    def __init__(self, batch: Any, args: Any, others: Mapping[str, Callable[[], float]]) -> None:
        super().__init__(batch, args)
        self.others = others
        self.samples: dict[str, list[float]] = {way: [] for way in (*others, BARE)}

    def __iter__(self) -> Iterator[Any]:
        yield from self.block(self.args.prepare_steps)
        for number in range(self.args.pairs):
            for way in reversed(self.samples) if number % 2 else self.samples:
                if way == BARE:
                    yield from self.block(self.args.block_steps)
                self.samples[way].append(self.block_ms if way == BARE else self.others[way]())


def by_hand_way(way: str, args: Any) -> Callable[[], float]:
    """Start the Trainer of a way in a thread, and return the function that runs its next block."""
    net, *batch = make(args.model, args.batch_size, args.image_size, args.device)
    if way != "eager":
        net.compile(mode=None if way == "default" else way)
    turns = Turns(batch, args)

    def fit() -> None:
        try:
            if args.device == "cuda":  # torch 2.11 does so for the main thread only
                states = {"tree_manager_containers": {}, "tree_manager_locks": defaultdict(threading.Lock)}
                for name, state in states.items():
                    setattr(cudagraph_trees.local, name, state)
                    torch._C._stash_obj_in_tls(name, state)
            make_trainer(args.device, num_sanity_val_steps=0).fit(Classifier(net), turns)
        finally:
            turns.ready.release()  # after an error, too

    threading.Thread(target=fit, name=way, daemon=True).start()
    return turns.run_block


def graph_way(args: Any) -> Callable[[], float]:
    """Record the CUDA graph of a training step, and return the function that replays it for a block."""
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
    add("--prepare-steps", type=int, default=660, help="untimed steps; the callback times half of its first 600")
    add("--ways", nargs="+", choices=list(WAYS), default=["eager", "default", "reduce-overhead"])
    args = parser.parse_args()
    others: dict[str, Callable[[], float]] = {}
    for way in args.ways:
        began = time.perf_counter()
        others[way] = graph_way(args) if way == "graph" else by_hand_way(way, args)
        others[way]()  # the steps that prepare
        say(f"{args.model}, batch {args.batch_size}: {way} is ready after {time.perf_counter() - began:.0f} s")
    net, *batch = make(args.model, args.batch_size, args.image_size, args.device)
    callback, rounds = InductorCompile(), Rounds(batch, args, others)
    make_trainer(args.device, callback, num_sanity_val_steps=0).fit(Classifier(net), rounds)
    blocks = rounds.samples
    rows: list[Row] = []
    for way, block_ms in blocks.items():
        mode = callback.report.train.mode if way == BARE else ""
        row = {"model": args.model, "batch_size": args.batch_size, "way": WAYS.get(way, way), "mode": mode}
        row |= summarize(block_ms) | {"block_ms": block_ms}
        for other in ("eager", "default", "reduce-overhead"):
            if other in blocks and other != way:
                row[f"over_{other}"] = with_interval(compare_blocks(blocks[other], block_ms))
        rows.append(row)
    save(args.json, f"{args.model}, batch {args.batch_size}, ways that alternate in one process", rows)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
