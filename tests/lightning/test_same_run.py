"""A run with the callback is the run without it: the same hooks, calls, counters and random numbers."""

from __future__ import annotations

import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import InductorCompile
from tests.support.models import FEATURES, Classifier, fit, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

CALLBACK_HOOKS = [name for name in dir(pl.Callback) if name.startswith(("on_", "setup", "teardown"))]
PREFIXES = ("on_", "configure_", "optimizer_", "transfer_", "prepare_data", "setup", "teardown", "backward", "lr_sched")


def hooks_of(kind: type) -> list[str]:
    """The hooks, steps and loaders of a LightningModule or LightningDataModule."""
    named = [name for name in dir(kind) if name.startswith(PREFIXES) or name.endswith(("_step", "_dataloader"))]
    return [name for name in named if inspect.isfunction(getattr(kind, name)) and name != "configure_sharded_model"]


def record_calls(names: list[str], owner: Any, hooks: list[str]) -> None:
    """Record the calls of these methods of an object."""

    def recorded(name, function):
        def call(*args, **kwargs):
            names.append(f"{type(owner).__name__}.{name}")
            return function(*args, **kwargs)

        return call

    for name in hooks:
        object.__setattr__(owner, name, recorded(name, getattr(owner, name)))


class RecordedNet(nn.Module):
    """A network that records each call of its forward."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.layers, self.names = mlp(), names

    def forward(self, x):
        self.record("net forward")
        return self.layers(x)

    @torch.compiler.disable  # Dynamo would guard on the length of the list
    def record(self, name):
        self.names.append(name)


class RecordedModule(Classifier):
    def forward(self, x):
        self.net.record("forward")
        return super().forward(x)


def recorded_names(*callbacks):
    """Every call of a hook or a forward in the four kinds of runs."""
    names: list[str] = []
    module = seeded(lambda: RecordedModule(RecordedNet(names)))
    data = pl.LightningDataModule()
    data.train_dataloader = lambda: loader(4)
    data.val_dataloader = data.test_dataloader = data.predict_dataloader = lambda: loader(2)
    of_data = ("_dataloader", "_batch_transfer", "_to_device")
    record_calls(names, module, [name for name in hooks_of(pl.LightningModule) if not name.endswith(of_data)])
    record_calls(names, data, hooks_of(pl.LightningDataModule))
    before, after = pl.Callback(), pl.Callback()
    for other in (before, after):
        record_calls(names, other, CALLBACK_HOOKS)
    for stage in ("fit", "validate", "test", "predict"):
        names.append(stage)
        run = trainer(before, *callbacks, after, max_epochs=2, num_sanity_val_steps=1, enable_checkpointing=True)
        getattr(run, stage)(module, datamodule=data)
    return names


def test_hooks_and_forward_calls_are_those_of_a_run_without_the_callback():
    callback = InductorCompile(baseline_steps=2)
    names = recorded_names(callback)
    assert names == recorded_names()
    assert {"net forward", "forward", "RecordedModule.on_save_checkpoint", "Callback.on_predict_end"} <= set(names)
    assert callback.report.infer.graphs > 0


class WithSubclass(Classifier):
    """Its first weight is a tensor subclass."""

    forward = pl.LightningModule.forward

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 3)))
        weight = self.net[0].weight.detach()
        self.net[0].weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.net(batch[0]))


def test_a_run_with_weights_that_are_tensor_subclasses_ends_as_usual():
    """At its end Lightning moves the module to the CPU, which swaps such weights: nothing may refer to them."""
    callback = InductorCompile(baseline_steps=0)
    module = fit(callback, make=WithSubclass, train=4)
    assert (callback.report.train.graphs, callback.report.train.fallbacks) == (1, 0)
    module.cpu()
