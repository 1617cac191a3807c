"""The default targets are the modules and methods that the first eager steps call."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch._dynamo.utils import counters
from torchmetrics import Metric

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.against_eager import assert_same_module, assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, fit

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
    """A metric with a network, as LPIPS and FID are."""

    def __init__(self):
        super().__init__()
        self.network = nn.Linear(CLASSES, 1).requires_grad_(False)
        self.add_state("total", torch.zeros(()))

    def update(self, out):
        self.total += self.network(out.detach()).square().sum()

    def compute(self):
        return self.total


class Steps(Classifier):
    """Its training step calls a function with the module and the inputs."""

    def __init__(self, call):
        super().__init__(Parts())
        self.ema = Ema(nn.Linear(FEATURES, CLASSES))
        self.metric = WithParameters()
        self.scale = nn.Softplus()
        self.call = call

    def logits(self, x):
        return self.call(self, x)

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


@pytest.mark.parametrize("call", CALLS)
def test_default_targets_are_the_called_modules_and_methods(call):
    function, called = CALLS[call]
    callback = InductorCompile(baseline_steps=0, verify="raise", on_error="raise")
    settings = {"make": lambda: Steps(function), "train": 4, "num_sanity_val_steps": 0}
    compiled, eager = fit(callback, **settings), fit(**settings)
    assert_same_values(compiled, eager)
    assert_same_module(compiled, eager)
    torch.testing.assert_close(compiled.metric.compute(), eager.metric.compute())  # each sample counts once
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
    fit(callback, make=Later, train=4)
    assert set(callback.report.train.targets) == {"net", "head"}


@pytest.mark.parametrize("targets", [None, ["net"]])
def test_a_target_that_only_a_compiled_function_calls_is_warned_about(targets):
    class Compiled(Classifier):
        def __init__(self):
            super().__init__()
            self.function = torch.compile(lambda net, x: net(x) * 2)

        def logits(self, x):
            return self.function(self.net, x)

    before = counters["stats"]["unique_graphs"]
    callback = InductorCompile("max-autotune-no-cudagraphs", None, targets=targets, on_error="raise", baseline_steps=2)
    with pytest.warns(CompileWarning, match="nothing is compiled in the train phase, because its steps call none of"):
        fit(callback, make=Compiled, train=20, validation=None)
    train = callback.report.train
    assert (train.graphs, train.compiled_step_ms, train.speedup) == (0, None, None)
    assert train.eager_step_ms is not None
    assert counters["stats"]["unique_graphs"] == before + 1  # the user's


def test_recording_ends_with_an_exception_and_leaves_a_users_profiler_alone(tmp_path):
    def fail(module, x):
        raise KeyError(module.net.encode(x).shape)

    with pytest.raises(KeyError):
        fit(InductorCompile(), make=lambda: Steps(fail))
    assert sys.getprofile() is None
    callback = InductorCompile(baseline_steps=0)
    fit(callback, profiler=AdvancedProfiler(tmp_path, "profile"))
    assert callback.report.train.graphs == 1
    assert "training_step" in (tmp_path / "fit-profile.txt").read_text()
