"""Tiny models and data, and a Trainer without output."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 8, 3
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
FLOAT32_ON_GPU = {"rtol": 1e-3, "atol": 1e-4}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))


class Wrapper(nn.Module):
    """Runs a module; for tests that write another ``forward`` around it."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net if net is not None else mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Cosines(nn.Module):
    """Eager execution saves sixteen values for the backward pass, and compiled code only the first one."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, features), nn.Linear(features, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(16):
            x = x.cos()
        return self.last(x)


class Classifier(pl.LightningModule):
    """Calls ``self(x)`` in validation and ``self.net(x)`` in training; keeps losses and validation outputs."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.net = net if net is not None else mlp()
        self.losses: list[float] = []
        self.validation_outputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The call of the training step, for subclasses that train with another one."""
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.logits(x), y)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        out = self(x)
        self.validation_outputs.append(out.detach().clone())
        self.log("val_loss", nn.functional.cross_entropy(out, y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def loader(batches: int = 8, batch_size: int = 4, seed: int = 0) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * batch_size, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (batches * batch_size,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def batches_of(*sizes: int) -> DataLoader:
    """Batches with these numbers of samples. Each epoch has new tensors, because torch marks the inputs of a graph."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(size, FEATURES, generator=generator), torch.randint(CLASSES, (size,), generator=generator))
        for size in sizes
    ]
    return DataLoader(batches, batch_size=None, collate_fn=lambda batch: [tensor.clone() for tensor in batch])


class RecordingLogger(Logger):
    """Keeps the metrics and the step of each call, may have a folder, and writes nothing into it."""

    log_dir: Any = None
    name: Any = "recording"
    version: Any = 0

    def __init__(self, folder: Any = None) -> None:
        super().__init__()
        self.log_dir = folder
        self.calls: list[tuple[dict[str, float], int]] = []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.calls.append((metrics, step))


def run_folder() -> str:
    """A new folder for the files of a run; conftest.py removes it at the end of the session."""
    root = os.environ.get("COMPILE_CALLBACKS_TEST_CACHE", f"{tempfile.gettempdir()}/compile_callbacks") + "_runs"
    os.makedirs(root, exist_ok=True)  # noqa: PTH103
    return tempfile.mkdtemp(dir=root)


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}


def trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    return pl.Trainer(callbacks=list(callbacks), **{**QUIET, "default_root_dir": run_folder(), **settings})


def seeded(make: Any = Classifier) -> Any:
    torch.manual_seed(1)
    return make()


def fit(
    *callbacks: pl.Callback,
    make: Any = Classifier,
    train: Any = 8,
    validation: Any = 2,
    ckpt_path: Any = None,
    **settings: Any,
) -> Any:
    """Train a module from a fixed seed, and return it. A number of batches stands for a loader of them."""
    module = seeded(make)
    train, validation = (loader(given) if isinstance(given, int) else given for given in (train, validation))
    trainer(*callbacks, **settings).fit(module, train, validation, ckpt_path=ckpt_path)
    return module


def assert_fits_as_eager(ours: pl.Callback, close: Any = None, **arguments: Any) -> Any:
    """Train with the callback and without it, compare losses, outputs and weights, and return the compiled module."""
    runs = [fit(ours, **arguments), fit(**arguments)]
    found = ([run.losses, run.validation_outputs, dict(run.state_dict())] for run in runs)
    torch.testing.assert_close(*found, **(close or FLOAT32))
    return runs[0]


class Manual(Classifier):
    """Manual optimization with two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.head = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for optimizer in self.optimizers():
            loss = nn.functional.cross_entropy(self.head(self.net(x)), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.Adam(self.head.parameters(), 0.01)]
