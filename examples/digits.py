"""The data, model and Trainer of the short examples: scikit-learn's handwritten digits and a small classifier."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

# The data are tensors in memory, so worker processes would make the example slower.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class DigitClassifier(pl.LightningModule):
    """A small network with a backbone and a linear head."""

    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.lr = lr
        # Without a bias before the batch norm: its gradient is only rounding errors, which Adam scales to full steps.
        self.backbone: nn.Module = nn.Sequential(
            nn.Linear(64, 128, bias=False), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (N, 10) of images (N, 64)."""
        return self.head(self.backbone(images))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("accuracy", (self(batch[0]).argmax(dim=1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.lr)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,536 digits for training and 256 digits for validation, the same in every run."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16).float()[order], torch.tensor(labels)[order]
    return TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:1792], y[1536:1792])


def loaders(batch_size: int = 64) -> tuple[DataLoader, DataLoader]:
    """Return the data loaders. All batches have the same size, so torch compiles for one shape."""
    train, val = digits()
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size)


def make_trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """Create a Trainer that writes no files and shows no progress bar, unless the settings enable them."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
        "devices": 1,
    }
    return pl.Trainer(callbacks=list(callbacks), **(quiet | settings))


def check(fact: bool, what: str) -> None:
    """End the example with an error if a check fails."""
    print(f"{'yes' if fact else 'NO'}: {what}")
    if not fact:
        raise SystemExit(1)
