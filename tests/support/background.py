"""Runs with ``background=True`` that end when their compiled steps have run."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchvision
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.events import CompileKey
from tests.support.models import CLASSES, Classifier, loader, seeded, trainer

SECONDS = 250


class Until(pl.Callback):
    """Ends the run after a number of compiled training steps, or if the phase never compiles."""

    def __init__(self, callback: InductorCompile, compiled_steps: int = 12, phase: str = "train") -> None:
        self.callback, self.compiled_steps, self.phase = callback, compiled_steps, phase
        self.ends = time.monotonic() + SECONDS
        self.pids: set[int] = set()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.pids |= pids(self.callback)
        steps = getattr(self.callback.report, self.phase).diagnostics.steps
        if steps.get("compiled", 0) >= self.compiled_steps or time.monotonic() > self.ends:
            trainer.should_stop = True


def pids(callback: InductorCompile) -> set[int]:
    conversation = callback.session._helper._conversation
    return set() if conversation is None else {conversation._process.pid}


def compiling_pids(callback: InductorCompile) -> set[int]:
    """Return the helper process if it has got a request."""
    return pids(callback) if any(graph.sent_to for graph in callback.session._requests.waiting) else set()


def waiting_graph(pickled: bytes, load: Any = pytest.fail, compile_here: Any = pytest.fail) -> SimpleNamespace:
    """A stand-in for a `RequestedGraph`."""
    key = CompileKey("net", "train")
    return SimpleNamespace(key=key, pickled=pickled, load=load, compile_here=compile_here, sent_to=None)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(callback: InductorCompile, *more: pl.Callback, module: Classifier | None = None, **settings: object):
    """Train until the callback has run compiled steps, and return the module and `Until`."""
    until = Until(callback)
    module = module or seeded()
    data, settings = settings.pop("data", loader()), {"max_epochs": -1, **settings}
    trainer(callback, until, *more, **settings).fit(module, data, loader(2))
    assert until.pids
    assert not any(is_running(pid) for pid in until.pids)
    return module, until


def eager_losses(
    count: int, module: Classifier | None = None, data: DataLoader | None = None, **settings: object
) -> Classifier:
    module = module or seeded()
    trainer(max_steps=count, max_epochs=-1, **settings).fit(module, data or loader(), loader(2) if not data else None)
    return module


def resnet18() -> Classifier:
    torch.manual_seed(0)
    return Classifier(torchvision.models.resnet18(num_classes=CLASSES))


def images() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32, generator=generator), torch.randint(CLASSES, (16,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


class UntilFallback(Until):
    """Ends the run some steps after a fallback to eager."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        self.compiled_steps -= self.callback.report.train.fallbacks
        if self.compiled_steps <= 0:
            trainer.should_stop = True
