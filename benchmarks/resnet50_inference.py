"""ResNet-50 inference in Lightning under CUDA graphs, bf16, channels last. Three parts:

predict     trainer.predict with a frozen infer phase, against a bare loop with the same Inductor settings and against
            eager; blocks of batches of the three alternate
validation  validation outputs of the compiled module after each epoch of a fit, against eager with the same weights
memory      peak memory of a fit with validation: eager, CUDA graphs in training, and in training and inference

python benchmarks/resnet50_inference.py [--parts predict validation memory] [--batch-size 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.config
from bench_measure import summarize
from models import make
from tables import Row, parser_for, print_columns, relative_error, save
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile

FROZEN = {"triton.cudagraphs": True, "freezing": True}  # the options of "reduce-overhead" and freezing
COLUMNS = {"part": "{}", "way": "{}", "step_ms": "{:.3f}", "ratio": "{:.3f}", "relative_error": "{:.1e}",
           "compiles": "{}", "reserved_gib": "{:.2f}"}  # fmt: skip


class Validated(Classifier):
    """Keeps the outputs of a validation."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.outputs: list[torch.Tensor] = []

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))


class CompiledByHand(Classifier):
    """Predicts with a function that a user compiled by hand."""

    def predict_step(self, batch, batch_idx):
        return self.call(batch[0])


def autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


class Interleaved(pl.Callback):
    """Times blocks of batches of a predict run, and between them blocks of other ways to predict the same batch.

    Each block is synchronized at both ends. The first one is a warm-up.

    Args:
        others: The other ways, by name.
        block: Batches of a block.
        collect: Whether predictions are collected on the CPU, as ``trainer.predict`` does by default.
    """

    def __init__(self, others: dict[str, Callable[[torch.Tensor], torch.Tensor]], block: int, collect: bool) -> None:
        self.others, self.block, self.collect = others, block, collect
        self.block_ms: dict[str, list[float]] = {"trainer.predict": [], **{name: [] for name in others}}

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx % self.block:
            return
        synchronize()
        if batch_idx:
            self.add("trainer.predict")
        # torch freezes if this global is set during tracing, in the first block. The Trainer's precision is active in
        # predict_step, not here.
        with torch._inductor.config.patch(freezing=batch_idx == 0), autocast(batch[0].device.type):
            for name, call in self.others.items():
                self.started = time.perf_counter()
                kept = [call(batch[0]).cpu() if self.collect else call(batch[0]) for _ in range(self.block)]
                synchronize()
                self.add(name)
                del kept
        self.started = time.perf_counter()

    def add(self, name: str) -> None:
        self.block_ms[name].append((time.perf_counter() - self.started) / self.block * 1000)

    def step_ms(self) -> dict[str, float]:
        return {name: summarize(block_ms[1:])["step_ms"] for name, block_ms in self.block_ms.items()}


def predict(args: argparse.Namespace) -> list[Row]:
    rows = []
    for collect in (False, True):
        times = predict_in(args, collect)
        part = "predictions collected on the CPU" if collect else "predictions stay on the device"
        rows += [
            {"part": part, "way": name, "step_ms": step_ms, "ratio": step_ms / times["bare loop"]}
            for name, step_ms in times.items()
        ]
    return rows


def predict_in(args: argparse.Namespace, collect: bool) -> dict[str, float]:
    torch._dynamo.reset()
    net, images, labels = make(args.model, args.batch_size, args.image_size, args.device)
    by_hand = make(args.model, args.batch_size, args.image_size, args.device)[0].eval()
    by_hand.load_state_dict(net.state_dict())
    compiled = torch.compile(by_hand, options=FROZEN)

    def bare(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(images).clone()  # a copy outside of the memory of the CUDA graph

    module = Classifier(net).eval()
    batches = loader([(images, labels)], args.block * args.blocks + 1)
    watch = Interleaved({"bare loop": bare, "eager": net._call_impl}, args.block, collect)
    callback = InductorCompile(None, {"options": FROZEN}, baseline_steps=0)
    make_trainer(args.device, callback, watch).predict(module, batches, return_predictions=collect)
    module = CompiledByHand(net).eval()
    module.call = bare
    alone = Interleaved({}, args.block, collect)
    with torch._inductor.config.patch(freezing=True):
        make_trainer(args.device, alone).predict(module, batches, return_predictions=collect)
    return watch.step_ms() | {"trainer.predict, compiled by hand": alone.step_ms()["trainer.predict"]}


class CompareWithEager(pl.Callback):
    """Compares the outputs of each validation with those of eager calls with the same weights."""

    def __init__(self, images: torch.Tensor) -> None:
        self.images = images
        self.errors: list[float] = []

    def on_validation_epoch_end(self, trainer, pl_module):
        with torch.no_grad(), autocast(self.images.device.type):
            expected = pl_module.net._call_impl(self.images)  # bypasses the compiled call
        self.errors.append(max(relative_error(output, expected) for output in pl_module.outputs))
        pl_module.outputs.clear()


def validation(args: argparse.Namespace) -> list[Row]:
    torch._dynamo.reset()
    net, images, labels = make(args.model, args.batch_size, args.image_size, args.device)
    compare = CompareWithEager(images)
    callback = InductorCompile("reduce-overhead", {"options": FROZEN}, baseline_steps=0)
    make_trainer(args.device, callback, compare, max_epochs=4, num_sanity_val_steps=0).fit(
        Validated(net), loader([(images, labels)], 6), loader([(images, labels)], 3)
    )
    compiles = sum(event["kind"] == "compile" for event in callback.report.infer.diagnostics.events)
    return [
        {"part": "validation", "way": f"epoch {epoch}", "relative_error": error, "compiles": compiles}
        for epoch, error in enumerate(compare.errors)
    ]


def memory(args: argparse.Namespace) -> list[Row]:
    rows = []
    for name, modes in {
        "eager": None,
        "train": ("reduce-overhead", None),
        "train and infer": ("reduce-overhead", "reduce-overhead"),
        "train and infer, no CUDA graphs": ("default", "default"),
    }.items():
        torch._dynamo.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        net, images, labels = make(args.model, args.batch_size, args.image_size, args.device)
        callbacks = [InductorCompile(*modes, baseline_steps=0, verify="off")] if modes else []
        make_trainer(args.device, *callbacks, max_epochs=2).fit(
            Validated(net), loader([(images, labels)], 6), loader([(images, labels)], 3)
        )
        reserved_gib = torch.cuda.max_memory_reserved() / 2**30 if args.device == "cuda" else None
        rows.append({"part": "memory", "way": name, "reserved_gib": reserved_gib})
        del net, images, labels, callbacks
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parts = {"predict": predict, "validation": validation, "memory": memory}
    add = parser.add_argument
    add("--parts", nargs="+", choices=list(parts), default=list(parts))
    add("--model", default="resnet50")
    add("--batch-size", type=int, default=128)
    add("--image-size", type=int, default=224)
    add("--block", type=int, default=40, help="batches of a block")
    add("--blocks", type=int, default=10, help="blocks of each way, the first one a warm-up")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    rows = []
    for part in args.parts:
        rows += parts[part](args)
        save(args.json, f"{args.model}, inference under CUDA graphs, batch {args.batch_size}", rows)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
