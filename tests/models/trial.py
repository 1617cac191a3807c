"""A model of another package, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch


@dataclass(frozen=True, kw_only=True)
class Trial:
    name: str
    make: Callable[[], pl.LightningModule]
    train: Callable[[], Iterable[Any] | None]  # makes the training data
    validate: Callable[[], Iterable[Any]] | None = None  # makes the validation data
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the Trainer
    tolerance: float = 1e-3
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the callback


class Trained(pl.LightningModule):
    """Has a net, and trains those of its weights that are not frozen with SGD."""

    rate = 0.05

    def __init__(self, net: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.net = net

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((weight for weight in self.parameters() if weight.requires_grad), lr=self.rate)
