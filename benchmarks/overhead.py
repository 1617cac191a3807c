"""What the callback adds to a steady training step, against the same child compiled by hand, in one run.

python benchmarks/overhead.py                                      a small net on the CPU
python benchmarks/overhead.py --device cuda --mode reduce-overhead   ResNet-50, batch 16, bf16
python benchmarks/overhead.py --device cuda --mode reduce-overhead --calling-thread

On a GPU the library has backward passes run in the thread that asks for them. With --calling-thread those of the child
compiled by hand do so too: what is left is what the callback costs. Without, it is what a user gets by hand.

Blocks of steps alternate between the two in one `fit`, so that both see the same machine; what is compared is
the wall time of whole blocks, loop and hooks included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings

import lightning.pytorch as pl
import torch
from models import make
from torch import nn
from ways import Classifier, Fixed

from compile_callbacks import InductorCompile

WARM_UP_STEPS = 40


def small_net() -> nn.Module:
    """Its steps take some milliseconds on two CPU cores."""
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))


class Alternate(InductorCompile):
    """`InductorCompile` in every other block of steps; in the others the child compiled by hand, and no hooks."""

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
        if torch.cuda.is_available():
            torch.cuda.synchronize()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--mode", default="default")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--block", type=int, default=20, help="steps in a block")
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each kind")
    parser.add_argument("--calling-thread", action="store_true", help="by hand too, backward passes run in it")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    steps = 2 * WARM_UP_STEPS + 2 * args.blocks * args.block + 1
    alternate = Alternate(args.mode, args.block, args.calling_thread)
    rows = args.batch_size * 8
    net, batch, precision = small_net(), (torch.randn(rows, 256), torch.randint(10, (rows,))), "32-true"
    if args.device == "cuda":
        net, *batch = make("resnet50", args.batch_size, 224, "cuda")
        precision = "bf16-mixed"
    trainer = pl.Trainer(
        accelerator=args.device, devices=1, precision=precision, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[alternate],
    )  # fmt: skip
    trainer.fit(Classifier(net), torch.utils.data.DataLoader(Fixed(tuple(batch), steps), batch_size=None))

    pairs = list(zip(alternate.seconds[True], alternate.seconds[False], strict=False))
    step_ms = {ours: statistics.median(s) / args.block * 1000 for ours, s in alternate.seconds.items()}
    difference_us = statistics.median((ours - hand) / args.block * 1e6 for ours, hand in pairs)
    result = {
        "by_hand_ms": step_ms[False],
        "callback_ms": step_ms[True],
        "by_hand_fastest_ms": min(alternate.seconds[False]) / args.block * 1000,
        "callback_fastest_ms": min(alternate.seconds[True]) / args.block * 1000,
        "overhead_us": difference_us,
        "overhead_percent": difference_us / step_ms[False] / 10,
        "pairs_of_blocks": len(pairs),
        "torch": torch.__version__,
    }
    print(
        f"compiled by hand {result['by_hand_ms']:.3f} ms a step, with the callback {result['callback_ms']:.3f} ms "
        f"(the fastest block {result['by_hand_fastest_ms']:.3f} and {result['callback_fastest_ms']:.3f} ms); median "
        f" difference of {len(pairs)} pairs of blocks: {difference_us:.1f} us, {result['overhead_percent']:.2f} %"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
