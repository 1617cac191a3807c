"""The default targets are the modules and methods that the first eager steps call."""

from __future__ import annotations

import copy
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch._dynamo.utils import counters
from torchmetrics import Metric

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


class Parts(nn.Module):
    """Has methods, and a forward that calls one of them."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.decode(self.encoder(x))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.head(x).relu()

    def generate(self, x):
        return self.encoder(x).sum() + self(x)


class Ema(nn.Module):
    """Steps call the module inside it."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.copy = copy.deepcopy(module)

    def forward(self, x):
        return self.copy(x)


class WithParameters(Metric):
    """A metric with a network, as metrics of images have."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(CLASSES, 1)
        self.add_state("total", torch.zeros(()))

    def update(self, out):
        self.total += self.network(out.detach()).sum().detach()

    def compute(self):
        return self.total


class Steps(pl.LightningModule):
    """Its training step calls a function with the module and the inputs."""

    def __init__(self, call):
        super().__init__()
        self.net = Parts()
        self.ema = Ema(nn.Linear(FEATURES, CLASSES))
        self.metric = WithParameters()
        self.scale = nn.Softplus()
        self.call = call
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.call(self, batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.metric(self.ema.module(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD([*self.net.parameters(), *self.ema.parameters()], lr=0.1)


CALLS = {
    "module": (lambda m, x: m.net(x), {"net"}),
    "forward": (lambda m, x: m.net.forward(x), {"net.forward"}),
    "methods": (lambda m, x: m.net.decode(m.scale(m.net.encode(x))), {"net.encode", "net.decode"}),
    "method that calls its module": (lambda m, x: m.net.generate(x), {"net", "net.encoder"}),
    "module inside a child": (lambda m, x: m.ema.module(x), {"ema.module"}),
}


def fit(module, *callbacks, batches=4, **settings):
    trainer(*callbacks, num_sanity_val_steps=0, **settings).fit(module, loader(batches), loader(2))
    return module


@pytest.mark.parametrize("call", CALLS)
def test_default_targets_are_the_called_modules_and_methods(call):
    function, called = CALLS[call]
    callback = InductorCompile(baseline_steps=0, verify="raise", on_error="raise")
    losses = [fit(seeded(lambda: Steps(function)), *callbacks).losses for callbacks in ([callback], [])]
    torch.testing.assert_close(*losses)
    train, infer = callback.report.train, callback.report.infer
    assert {event["target"] for event in train.diagnostics.events if event["kind"] == "compile"} == called
    assert set(train.targets) == called
    assert {event["target"] for event in infer.diagnostics.events if event["kind"] == "compile"} == {"ema.module"}
    assert sys.getprofile() is None


def test_a_child_that_is_called_later_is_compiled_then():
    class Later(Classifier):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(CLASSES, CLASSES)

        def training_step(self, batch, batch_idx):
            out = self.net(batch[0])
            return nn.functional.cross_entropy(self.head(out) if batch_idx > 1 else out, batch[1])

    callback = InductorCompile(baseline_steps=0)
    fit(Later(), callback)
    assert set(callback.report.train.targets) == {"net", "head"}


@pytest.mark.parametrize("targets", [None, ["net"]])
def test_a_target_that_only_a_compiled_function_calls_is_warned_about(targets):
    class Compiled(Classifier):
        def __init__(self):
            super().__init__()
            self.function = torch.compile(lambda net, x: net(x) * 2)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.function(self.net, batch[0]), batch[1])

    before = counters["stats"]["unique_graphs"]
    callback = InductorCompile("max-autotune-no-cudagraphs", None, targets=targets, on_error="raise", baseline_steps=2)
    with pytest.warns(CompileWarning, match="nothing is compiled in the train phase, because its steps call none of"):
        trainer(callback, limit_val_batches=0).fit(Compiled(), loader(20))
    train = callback.report.train
    assert (train.graphs, train.compiled_step_ms, train.speedup) == (0, None, None)
    assert train.eager_step_ms is not None
    assert counters["stats"]["unique_graphs"] == before + 1  # the user's


def test_recording_ends_with_an_exception_and_leaves_a_users_profiler_alone(tmp_path):
    def fail(module, x):
        raise KeyError(module.net.encode(x).shape)

    with pytest.raises(KeyError):
        fit(Steps(fail), InductorCompile())
    assert sys.getprofile() is None
    callback = InductorCompile(baseline_steps=0)
    fit(Classifier(), callback, profiler=AdvancedProfiler(tmp_path, "profile"))
    assert callback.report.train.graphs == 1
    assert "training_step" in (tmp_path / "fit-profile.txt").read_text()
