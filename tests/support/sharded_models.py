"""A tiny stack of blocks, whole and sharded by FSDP2, and trainers for both."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from tests.support import models
from tests.support.models import trainer
from tests.support.pairs import ACCELERATOR

WIDTH, BLOCKS, SAMPLES, BATCH = models.FEATURES, 3, 24, 6  # BATCH: of all devices together


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))


class Blocks(nn.Module):
    """Blocks between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, models.CLASSES)
        self.checkpoints = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


class Whole(pl.LightningModule):
    """Trains `Blocks`, and keeps the losses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Blocks()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WholeForward(Whole):
    """Has a ``forward``, which its steps do not call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Sharded(Whole):
    """`Whole` with each block sharded, and the rest around them, or the net as one."""

    def __init__(self, *, by_block: bool = True) -> None:
        super().__init__()
        self.by_block = by_block

    def configure_model(self) -> None:
        if isinstance(self.net, FSDPModule):
            return
        assert self.device_mesh is not None
        settings: Any = {"mesh": self.device_mesh["data_parallel"]}
        shard_blocks(self.net, **settings) if self.by_block else fully_shard(self.net, **settings)


def shard_blocks(net: Blocks, **settings: Any) -> Any:
    """Shard each block, and the rest around the blocks."""
    for layer in net.layers:
        fully_shard(layer, **settings)
    return fully_shard(net, **settings)


def data() -> Any:
    return models.loader(batches=SAMPLES // BATCH, batch_size=BATCH).dataset


def loader(devices: int) -> DataLoader:
    """A batch of all devices together is the same samples for any number of devices."""
    sampler = None
    if devices > 1:  # Lightning's own would shuffle
        sampler = DistributedSampler(data(), devices, int(os.environ["LOCAL_RANK"]), shuffle=False)
    return DataLoader(data(), BATCH // devices, sampler=sampler)


def two_devices(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A trainer of two processes."""
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)
    defaults = {"accelerator": ACCELERATOR, "devices": 2, "strategy": strategy, "num_sanity_val_steps": 0}
    return trainer(*callbacks, **(defaults | settings))


def one_device(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    return trainer(*callbacks, num_sanity_val_steps=0, **settings)
