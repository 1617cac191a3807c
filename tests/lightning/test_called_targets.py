"""The default targets are the modules and methods that the first eager steps call."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import AdvancedProfiler
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from torchmetrics import Metric

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]


class Parts(nn.Module):
    """Has methods, and a forward that calls one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    @torch.no_grad()
    def encode_without_grad(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).relu()

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x).sum() + self(x)

    def width(self) -> int:
        return self.head.in_features


class Ema(nn.Module):
    """Holds a module that a step calls beneath it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.copy = copy.deepcopy(module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.copy(x)


class WithParameters(Metric):
    """Holds a network, as metrics of images do."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(CLASSES, 1)
        self.add_state("total", torch.zeros(()))

    def update(self, out: torch.Tensor) -> None:
        self.total += self.network(out.detach()).sum().detach()

    def compute(self) -> torch.Tensor:
        return self.total


class Steps(pl.LightningModule):
    """Its steps call one function with the module and the batch's inputs."""

    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.net = Parts()
        self.ema = Ema(nn.Linear(FEATURES, CLASSES))
        self.metric = WithParameters()
        self.scale = nn.Softplus()
        self.call = call
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.call(self, batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric(self.ema.module(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.net.parameters(), *self.ema.parameters()], lr=0.1)


def shared_step(module: Steps, x: torch.Tensor) -> torch.Tensor:
    return module.net.decode(module.scale(module.net.encode(x)))


CALLS = {
    "the call": (lambda module, x: module.net(x), {"net"}),
    "forward by name": (lambda module, x: module.net.forward(x), {"net.forward"}),
    "methods, and a module without parameters": (shared_step, {"net.encode", "net.decode"}),
    "a decorated method": (
        lambda module, x: module.net.head(module.net.encode_without_grad(x)),
        {"net.encode_without_grad", "net.head"},
    ),
    "a method that calls its module": (
        lambda module, x: module.net.generate(x),
        {"net", "net.encoder"},
    ),
    "beneath a child": (lambda module, x: module.ema.module(x), {"ema.module"}),
    "a method that computes nothing": (lambda module, x: module.net(x) / module.net.width(), {"net"}),
    "under activation checkpointing": (lambda module, x: checkpoint(module.net, x, use_reentrant=False), {"net"}),
}


def fit(module: pl.LightningModule, *callbacks: pl.Callback, batches: int = 4, **settings: Any) -> None:
    trainer(*callbacks, num_sanity_val_steps=0, **settings).fit(module, loader(batches), loader(2))


@pytest.mark.parametrize("call", CALLS)
def test_default_targets_are_the_called_modules_and_methods(call):
    function, called = CALLS[call]
    compiled, plain = seeded(lambda: Steps(function)), seeded(lambda: Steps(function))
    callback = InductorCompile(baseline_steps=0, verify="raise", on_error="raise")
    fit(compiled, callback)
    fit(plain)
    torch.testing.assert_close(compiled.losses, plain.losses)
    train, infer = callback.report.train, callback.report.infer
    assert {event["target"] for event in train.diagnostics.events if event["kind"] == "compile"} == called
    assert set(train.targets) == called
    assert {event["target"] for event in infer.diagnostics.events if event["kind"] == "compile"} == {"ema.module"}
    assert sys.getprofile() is None


class Later(Classifier):
    """Calls a second child from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        return nn.functional.cross_entropy(self.head(out) if batch_idx > 1 else out, batch[1])


def test_a_child_that_is_called_later_is_compiled_then():
    callback = InductorCompile(baseline_steps=0)
    fit(Later(), callback)
    assert set(callback.report.train.targets) == {"net", "head"}


def test_layers_that_a_step_calls_in_a_loop_share_one_graph():
    class Looped(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Module()
            self.net.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))

        def training_step(self, batch, batch_idx):
            x = batch[0]
            for block in self.net.blocks:
                x = block(x)
            return x.square().mean()

    callback = InductorCompile("default", None, baseline_steps=0)
    before = counters["stats"]["unique_graphs"]
    trainer(callback, limit_val_batches=0).fit(Looped(), loader(4))
    # The first block's input needs no gradient, so it has a graph of its own.
    assert callback.report.train.targets == ("net.blocks.* (3 blocks, 2 graphs)",)
    assert counters["stats"]["unique_graphs"] == before + 2


@pytest.mark.parametrize("targets", [None, ["net"]])
def test_a_target_that_only_a_function_of_the_user_calls_is_warned_about(targets):
    class Compiled(Classifier):
        def __init__(self) -> None:
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


def test_a_named_target_that_is_never_called_is_warned_about_by_name():
    callback = InductorCompile(targets=["net", "ema"], baseline_steps=0)
    with pytest.warns(CompileWarning, match="target 'ema' was never called"):
        trainer(callback, limit_val_batches=0).fit(Steps(lambda module, x: module.net(x)), loader(3))


def test_a_steps_exception_ends_the_record():
    def fail(module: Steps, x: torch.Tensor) -> torch.Tensor:
        raise KeyError(module.net.encode(x).shape)

    with pytest.raises(KeyError):
        fit(Steps(fail), InductorCompile())
    assert sys.getprofile() is None


def test_the_users_profiler_goes_on(tmp_path):
    profiler = AdvancedProfiler(tmp_path, "profile")
    callback = InductorCompile(baseline_steps=0)
    fit(Classifier(), callback, profiler=profiler)
    assert callback.report.train.graphs == 1
    assert "training_step" in (tmp_path / "fit-profile.txt").read_text()
