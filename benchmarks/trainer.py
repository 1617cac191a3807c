"""The Lightning part that the benchmarks share: a module, data that is loaded once, a quiet Trainer, and a clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Classifier(pl.LightningModule):
    """Trains a net, or predicts with it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9, fused=True)


class Repeated(Dataset):
    """Returns the same batches again and again, so that data loading is not measured."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]], steps: int) -> None:
        self.batches, self.steps = batches, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batches[index % len(self.batches)]


def loader(batches: Sequence[tuple[Tensor, Tensor]], steps: int) -> DataLoader:
    """A loader that returns the batches, one for each step, and begins again after the last."""
    return DataLoader(Repeated(batches, steps), batch_size=None)


def make_trainer(device: str, *callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A Trainer without logger, checkpoints, progress bar and summary; bf16 autocast on a GPU."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    defaults = {"devices": 1, "precision": precision, "max_epochs": 1, "use_distributed_sampler": False}
    return pl.Trainer(accelerator=device, callbacks=list(callbacks), **(quiet | defaults | settings))


def synchronize() -> None:
    """Wait for the GPU, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class BlockClock(pl.Callback):
    """Times blocks of training steps, synchronized at both ends."""

    def __init__(self, block: int = 1) -> None:
        self.block = block
        self.marks: list[float] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx % self.block == 0:
            self.mark()

    def on_train_end(self, trainer, pl_module):
        self.mark()

    def mark(self) -> None:
        synchronize()
        self.marks.append(time.perf_counter())

    @property
    def block_ms(self) -> list[float]:
        """Milliseconds of a step, for each block."""
        return [(b - a) / self.block * 1000 for a, b in zip(self.marks, self.marks[1:], strict=False)]
