"""ResNet-50 training in Lightning, bf16, channels_last: eager, Lightning's torch.compile, this library.

python benchmarks/resnet50_training.py [--batch-sizes 16 128] [--steps 60]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings

import lightning.pytorch as pl
import torch
import torchvision

from compile_callbacks import InductorCompile


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torchvision.models.resnet50().to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, fused=True)


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


class Stopwatch(pl.Callback):
    """Wall time of whole blocks of steps, synchronised at both ends."""

    def __init__(self, block: int = 10) -> None:
        self.block = block
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % self.block == 0:
            torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    def median_ms(self, last: int = 10) -> float:
        times = [(b - a) / self.block * 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
        return statistics.median(times[-last:])


def train(batch_size: int, steps: int, *callbacks: pl.Callback, wrap=lambda module: module) -> float:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Classifier()
    watch = Stopwatch()
    trainer = pl.Trainer(
        accelerator="cuda", devices=1, precision="bf16-mixed", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, watch],
    )  # fmt: skip
    trainer.fit(wrap(module), torch.utils.data.DataLoader(Fixed(batch_size, steps), batch_size=None))
    del trainer, module
    torch.cuda.empty_cache()
    return watch.median_ms()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--modes", nargs="+", default=["default", "reduce-overhead"])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    rows = {}
    for batch_size in args.batch_sizes:
        rows[f"{batch_size} eager"] = train(batch_size, args.steps)
        rows[f"{batch_size} torch.compile(module)"] = train(batch_size, args.steps, wrap=torch.compile)
        for mode in args.modes:
            callback = InductorCompile(mode, None, baseline_steps=10)
            rows[f"{batch_size} InductorCompile({mode!r})"] = train(batch_size, args.steps, callback)
            print(callback.report, flush=True)
        for name, value in rows.items():
            print(f"{name:45} {value:8.2f} ms", flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
