"""ResNet-50 inference in Lightning under CUDA graphs, bf16, channels_last, on one GPU. Three parts:

predict     trainer.predict with a frozen infer phase, against a bare loop with the same Inductor settings and against
            eager; blocks of batches of the three alternate
validation  validation outputs of the compiled module after each epoch of a fit, against eager ones of the same weights
memory      peak memory of a fit with validation: eager, CUDA graphs in training, and in training and inference

python benchmarks/resnet50_inference.py [--parts predict validation memory] [--batch-size 128]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.config
import torchvision

from compile_callbacks import InductorCompile

# What "reduce-overhead" and freezing come to, for a bare loop and for this library.
FROZEN = {"triton.cudagraphs": True, "freezing": True}


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet50().to(memory_format=torch.channels_last)
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.net(batch[0]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9, fused=True)


class Fixed(torch.utils.data.Dataset):
    """The same batch on the GPU each time: data loading is not what is measured."""

    def __init__(self, batch_size: int, steps: int) -> None:
        images = torch.randn(batch_size, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
        self.batch = images, torch.randint(1000, (batch_size,), device="cuda")
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index):
        return self.batch


def loader(batch_size: int, steps: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Fixed(batch_size, steps), batch_size=None)


def make_trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        accelerator="cuda", devices=1, precision="bf16-mixed", enable_model_summary=False,
        callbacks=list(callbacks), **(quiet | settings),
    )  # fmt: skip


class Interleaved(pl.Callback):
    """Times blocks of batches of a predict run, and between them blocks of other ways to do the same work.

    Each block is synchronised at both ends. The first one warms up.

    Args:
        others: Ways to predict a batch, by name.
        block: Batches in a block.
        collect: Whether predictions are collected on the CPU, as ``trainer.predict`` does unless it is told otherwise.
    """

    def __init__(self, others: dict[str, Callable[[torch.Tensor], torch.Tensor]], block: int, collect: bool) -> None:
        self.others = others
        self.block = block
        self.collect = collect
        self.times: dict[str, list[float]] = {"trainer.predict": [], **{name: [] for name in others}}

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx % self.block:
            return
        torch.cuda.synchronize()
        if batch_idx:
            self.add("trainer.predict")
        # Torch bakes weights in only where the global is set while it traces: in the first block. A trainer's
        # precision holds in predict_step, not here.
        frozen = torch._inductor.config.patch(freezing=batch_idx == 0)
        with frozen, torch.autocast("cuda", torch.bfloat16):
            for name, call in self.others.items():
                self.started = time.perf_counter()
                kept = [call(batch[0]).cpu() if self.collect else call(batch[0]) for _ in range(self.block)]
                torch.cuda.synchronize()
                self.add(name)
                del kept
        self.started = time.perf_counter()

    def add(self, name: str) -> None:
        self.times[name].append((time.perf_counter() - self.started) / self.block * 1000)

    def median_ms(self, name: str) -> float:
        return statistics.median(self.times[name][1:])


def bare(module: Classifier) -> Callable[[torch.Tensor], torch.Tensor]:
    """The body of a loop without Lightning: compiled by hand, frozen, outputs copied out of CUDA-graph memory."""
    net = torchvision.models.resnet50().to(memory_format=torch.channels_last).cuda().eval()
    net.load_state_dict(module.net.state_dict())
    compiled = torch.compile(net, options=FROZEN)

    def call(images: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(images).clone()

    return call


class CompiledByHand(Classifier):
    """What a user writes without this library, for what Lightning's own loop takes."""

    def predict_step(self, batch, batch_idx):
        return self.call(batch[0])


def predict(batch_size: int, block: int = 40, blocks: int = 10) -> dict[str, dict[str, float]]:
    return {
        loop: predict_in(loop, batch_size, block, blocks, collect)
        for loop, collect in {"predictions stay on the GPU": False, "predictions collected on the CPU": True}.items()
    }


def predict_in(loop: str, batch_size: int, block: int, blocks: int, collect: bool) -> dict[str, float]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    module = Classifier().eval()
    batches = loader(batch_size, block * blocks + 1)
    others = {"bare loop": bare(module), "eager": module.net._call_impl}
    watch = Interleaved(others, block, collect)
    callback = InductorCompile(None, {"options": FROZEN}, baseline_steps=0)
    make_trainer(callback, watch).predict(module, batches, return_predictions=collect)
    by_hand = CompiledByHand().eval()
    by_hand.call = others["bare loop"]
    alone = Interleaved({}, block, collect)
    with torch._inductor.config.patch(freezing=True):
        make_trainer(alone).predict(by_hand, batches, return_predictions=collect)
    times = {name: watch.median_ms(name) for name in watch.times}
    times["trainer.predict, compiled by hand"] = alone.median_ms("trainer.predict")
    for name, ms in times.items():
        print(f"predict  {loop}: {name:34} {ms:7.3f} ms a batch of {batch_size}")
    times["ratio"] = times["trainer.predict"] / times["bare loop"]
    print(f"predict  {loop}: trainer.predict / bare loop = {times['ratio']:.3f}", flush=True)
    return times


class EagerToo(pl.Callback):
    """After each validation in a fit, what eager code gives for the same weights."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.batch = batch
        self.differences: list[float] = []

    def on_validation_epoch_end(self, trainer, pl_module):
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            expected = pl_module.net._call_impl(self.batch).double()  # past what was compiled
        norms = [
            float(torch.linalg.vector_norm(out.double() - expected) / torch.linalg.vector_norm(expected))
            for out in pl_module.validated
        ]
        pl_module.validated.clear()
        self.differences.append(max(norms))


def validation(batch_size: int, epochs: int = 4) -> dict[str, Any]:
    torch.manual_seed(0)
    batches = loader(batch_size, 3)
    eager = EagerToo(batches.dataset.batch[0])
    callback = InductorCompile("reduce-overhead", {"options": FROZEN}, baseline_steps=0)
    make_trainer(callback, eager, max_epochs=epochs, num_sanity_val_steps=0).fit(
        Classifier(), loader(batch_size, 6), batches
    )
    compiles = [event for event in callback.report.infer.events if event["kind"] == "compile"]
    print(f"validation  off by {[f'{d:.1e}' for d in eager.differences]} of the norm after each epoch; ", end="")
    print(f"{len(compiles)} compiles of the infer phase", flush=True)
    return {"differences": eager.differences, "compiles": len(compiles)}


def memory(batch_size: int) -> dict[str, float]:
    peaks = {}
    for name, modes in {
        "eager": (None, None),
        "train": ("reduce-overhead", None),
        "train and infer": ("reduce-overhead", "reduce-overhead"),
        "train and infer, no CUDA graphs": ("default", "default"),
    }.items():
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        module = Classifier()
        callbacks = [InductorCompile(*modes, baseline_steps=0, verify="off")] if any(modes) else []
        make_trainer(*callbacks, max_epochs=2).fit(module, loader(batch_size, 6), loader(batch_size, 3))
        peaks[name] = torch.cuda.max_memory_reserved() / 2**30
        print(f"memory  {name:32} {peaks[name]:6.2f} GiB reserved at most, batch {batch_size}", flush=True)
        del module, callbacks
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"predict": predict, "validation": validation, "memory": memory}
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    print(json.dumps({part: parts[part](args.batch_size) for part in args.parts}))


if __name__ == "__main__":
    main()
