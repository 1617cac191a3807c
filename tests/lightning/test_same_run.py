"""A run with the callback is the run without it: the same hooks, counters, random numbers, losses and results."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import InductorCompile
from tests.lightning.test_messages import Force
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, mlp, seeded, trainer

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


def convolutional():
    layers = nn.Conv2d(2, 8, 2, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2), nn.BatchNorm2d(4)
    return Classifier(nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers, nn.Flatten(), nn.Linear(16, 3)))


@pytest.mark.codegen
@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_two_runs_with_a_deterministic_trainer_are_bit_equal(accelerator):
    def run():
        torch._dynamo.reset()
        callback = InductorCompile()
        settings = {"max_epochs": 2, "deterministic": True, "accelerator": accelerator}
        module = fit(callback, make=convolutional, train=20, validation=16, **settings)
        assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
        return module.losses, module.validation_outputs, module.state_dict()

    try:
        torch.testing.assert_close(run(), run(), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


# ------------------------------------------------------------------------------------------ code that users write

STEPS = 24  # 12 of them are eager


def assert_trains_as_eager(make, callback=None):
    callback = callback or InductorCompile()
    compiled = assert_fits_as_eager(callback, make=make, train=STEPS, validation=None)
    return compiled, callback.report.train


class SwapsWeights(Classifier):
    """Validates with other weights, and puts the first ones back, as averages of weights by hand do."""

    def validation_step(self, batch, batch_idx):
        own = [weight.detach().clone() for weight in self.net.parameters()]
        for weight in self.net.parameters():
            weight.data.mul_(2)
        self.validation_outputs.append(self.net(batch[0]))
        for weight, value in zip(self.net.parameters(), own, strict=True):
            weight.data.copy_(value)
        self.validation_outputs.append(self.net(batch[0]))


def test_weights_that_are_swapped_through_data_within_a_step_are_used():
    runs = []
    for callbacks in ([InductorCompile()], []):
        runs.append(seeded(SwapsWeights))
        trainer(*callbacks).validate(runs[-1], loader(STEPS), verbose=False)
    torch.testing.assert_close(runs[0].validation_outputs, runs[1].validation_outputs)


@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly:compile_callbacks.CompileWarning")
@pytest.mark.filterwarnings("ignore:compiled train steps are slower:compile_callbacks.CompileWarning")
def test_a_module_that_computes_gradients_in_its_forward_is_not_traced_in_each_step():
    """The target stays eager: torch 2.15 compiles no graph of it, and torch 2.11 could not differentiate the graph."""
    _, train = assert_trains_as_eager(lambda: Classifier(Force()))
    traced = [kind for kind in train.diagnostics.series if kind["kind"] == "compiling"]
    assert sum(len(kind["steps"]) for kind in traced) <= 5
    assert train.graphs <= 1  # torch 2.11 compiles what stands before ``requires_grad_``
    assert train.fallbacks == 1


class Recurrent(Classifier):
    def __init__(self):
        super().__init__(nn.Linear(8, CLASSES))
        self.rnn = nn.GRU(FEATURES, 8, batch_first=True)

    def logits(self, x):
        return self.net(self.rnn(x[:, None])[0][:, 0])


def test_an_rnn_is_no_default_target_because_dynamo_compiles_none():
    _, train = assert_trains_as_eager(Recurrent)
    assert train.targets == ("net",)
    assert train.fallbacks == 0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(FEATURES, CLASSES), []

    def encode(self, x):
        return self.linear(x)

    @functools.lru_cache  # noqa: B019
    def mask(self, size):
        self.calls.append(size)
        return torch.ones(size, 1)


class CallsMethods(Classifier):
    def logits(self, x):
        method = self.net.encode
        assert (method.__name__, method.__self__) == ("encode", self.net)
        return self.net.mask(len(x)) * method(x)


def test_a_method_that_is_a_target_keeps_its_name_and_a_cached_one_is_called_as_often_as_before():
    compiled, train = assert_trains_as_eager(lambda: CallsMethods(Encoder()))
    assert train.targets == ("net.encode",)
    assert len(compiled.net.calls) == 1
