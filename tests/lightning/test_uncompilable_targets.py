"""Targets that torch.compile cannot compile: TorchScript modules, async functions, and modules of skipped layers."""

from __future__ import annotations

import asyncio
import inspect
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.against_eager import assert_fits_as_eager, assert_same_values
from tests.support.models import FEATURES, Classifier, fit, mlp

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


class WithScript(Classifier):
    """Its step calls a scripted and a traced child before the network."""

    forward = pl.LightningModule.forward

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates TorchScript
            self.scripted = torch.jit.script(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
            self.traced = torch.jit.trace(nn.Linear(FEATURES, FEATURES), torch.ones(2, FEATURES))

    def logits(self, x):
        return self.net(self.traced(self.scripted(x)))

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.logits(batch[0]))


def test_script_children_are_not_default_targets():
    callback = InductorCompile(baseline_steps=0, on_error="raise")
    assert_fits_as_eager(callback, make=WithScript)
    for phase in (callback.report.train, callback.report.infer):
        assert phase.targets == ("net",)
        assert (phase.graphs, phase.graph_breaks, phase.fallbacks) == (1, 0, 0)


@pytest.mark.parametrize("targets", [["traced", "net"], ["scripted.forward"]])
def test_a_named_script_module_runs_eagerly_with_a_warning(targets):
    callback = InductorCompile(targets=targets, baseline_steps=0)
    with pytest.warns(CompileWarning, match=f"target '{targets[0]}' is not compiled: it is a TorchScript module"):
        module = fit(callback, make=WithScript)
    eager = fit(make=WithScript)
    assert_same_values(module, eager)
    assert callback.report.train.targets == tuple(targets[1:])
    assert vars(module.scripted).keys() == vars(eager.scripted).keys()


class Asynchronous(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    async def forward(self, x):
        return self.net(x)

    async def encode(self, x):
        return self.net(x)


class Awaits(Classifier):
    """Awaits the call, or a method, of its net."""

    forward = pl.LightningModule.forward

    def __init__(self, method):
        super().__init__(Asynchronous())
        self.method = method

    def logits(self, x):
        coroutine = self.net(x) if self.method == "call" else getattr(self.net, self.method)(x)
        assert inspect.iscoroutine(coroutine)
        return asyncio.run(coroutine)

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.logits(batch[0]))


@pytest.mark.parametrize(("method", "targets"), [("call", None), ("call", "net"), ("encode", "net.encode")])
def test_an_async_target_returns_a_coroutine_with_a_warning(method, targets):
    callback = InductorCompile(targets=targets, baseline_steps=0)
    message = f"target '{targets or 'net'}' is not compiled: its .* is an async function"
    with pytest.warns(CompileWarning, match=message):
        assert_fits_as_eager(callback, make=lambda: Awaits(method))
    # The first steps call the module inside an async forward too, so it is a default target.
    assert callback.report.train.targets == (("net.net",) if targets is None else ())


class _Skipped(nn.Module):
    """Torch compiles only the last of its layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(8)))
        self.head = nn.Linear(FEATURES, 3)

    @torch.compiler.disable
    def features(self, x):
        return self.layers(x)

    def forward(self, x):
        return self.head(self.features(x))


def test_a_target_whose_graphs_use_few_of_its_weights_is_reported_with_the_share():
    callback = InductorCompile(infer_mode="eager", targets="net", baseline_steps=0)
    message = r"graphs of target 'net' use 2 of its 18 weights \(11%\) in the train phase, .*\.py:\d+"
    with pytest.warns(CompileWarning, match=message):
        assert_fits_as_eager(callback, make=lambda: Classifier(_Skipped()))
