"""The overhead of the callback in a steady training step, against the same child compiled by hand, in one run.

python benchmarks/overhead.py                                        a small net on the CPU
python benchmarks/overhead.py --device cuda --mode reduce-overhead   ResNet-50, batch 16, bf16
python benchmarks/overhead.py --device cuda --mode reduce-overhead --calling-thread

On a GPU the library runs backward passes in the calling thread. With --calling-thread those of the child compiled by
hand run there too, so that the difference is the overhead of the callback. Without, it is the difference to what a user
gets by hand.

Blocks of steps alternate between the two in one `fit`; the times are those of whole blocks, loop and hooks included.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

import torch
from models import make
from tables import parser_for, save
from torch import nn
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile

WARM_UP_STEPS = 40


def small_net() -> nn.Module:
    """A net with steps of some milliseconds on two CPU cores."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


class Alternate(InductorCompile):
    """`InductorCompile` in every other block of steps; in the others the child compiled by hand, without our hooks."""

    def __init__(self, mode: str, block: int, calling_thread: bool) -> None:
        super().__init__(mode, None, baseline_steps=0, targets=["net"])
        self.mode, self.block, self.calling_thread = mode, block, calling_thread
        self.ours = True
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.started: float | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % self.block == 0:
            self.turn(pl_module, batch_idx)
        if self.ours:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer, pl_module):
        if self.ours:
            super().on_after_backward(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.ours:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def turn(self, module, batch_idx):
        synchronize()
        now = time.perf_counter()
        if self.started is not None and batch_idx > 2 * WARM_UP_STEPS:
            self.seconds[self.ours].append(now - self.started)
        if batch_idx == 0:
            self.dispatcher = module.net._compiled_call_impl
            module.net.compile(mode=self.mode)
            self.by_hand = module.net._compiled_call_impl
        self.ours = not self.ours
        module.net._compiled_call_impl = self.dispatcher if self.ours else self.by_hand
        torch.autograd.set_multithreading_enabled(self.ours or not self.calling_thread)
        self.started = time.perf_counter()

    def teardown(self, trainer, pl_module, stage):
        pl_module.net._compiled_call_impl = self.dispatcher
        super().teardown(trainer, pl_module, stage)


def measure(args: argparse.Namespace) -> dict[str, float]:
    alternate = Alternate(args.mode, args.block, args.calling_thread)
    if args.device == "cuda":
        net, *batch = make("resnet50", args.batch_size, 224, "cuda")
    else:
        count = args.batch_size * 8
        net, batch = small_net(), [torch.randn(count, 256), torch.randint(10, (count,))]
    steps = 2 * WARM_UP_STEPS + 2 * args.blocks * args.block + 1
    make_trainer(args.device, alternate).fit(Classifier(net), loader(tuple(batch), steps))
    ours_ms, by_hand_ms = ([s / args.block * 1000 for s in alternate.seconds[ours]] for ours in (True, False))
    pairs = list(zip(ours_ms, by_hand_ms, strict=False))
    overhead_us = statistics.median((ours - by_hand) * 1000 for ours, by_hand in pairs)
    return {
        "by_hand_ms": statistics.median(by_hand_ms),
        "callback_ms": statistics.median(ours_ms),
        "by_hand_fastest_ms": min(by_hand_ms),
        "callback_fastest_ms": min(ours_ms),
        "overhead_us": overhead_us,
        "overhead_percent": overhead_us / statistics.median(by_hand_ms) / 10,
        "pairs_of_blocks": len(pairs),
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.set_defaults(device="cpu")
    add = parser.add_argument
    add("--mode", default="default")
    add("--batch-size", type=int, default=16)
    add("--block", type=int, default=20, help="steps of a block")
    add("--blocks", type=int, default=60, help="blocks of each kind")
    add("--calling-thread", action="store_true", help="backward passes by hand run in the calling thread too")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    row = measure(args)
    print(
        f"compiled by hand {row['by_hand_ms']:.3f} ms a step, with the callback {row['callback_ms']:.3f} ms (fastest "
        f"blocks {row['by_hand_fastest_ms']:.3f} and {row['callback_fastest_ms']:.3f} ms); median difference of "
        f"{row['pairs_of_blocks']} pairs of blocks: {row['overhead_us']:.1f} us, {row['overhead_percent']:.2f} %"
    )
    save(args.json, f"Overhead of the callback, mode {args.mode}", [row])


if __name__ == "__main__":
    main()
