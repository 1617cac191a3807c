"""Targets that torch.compile cannot compile run as they are: TorchScript modules and async functions."""

from __future__ import annotations

import asyncio
import inspect
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile, compile_phases
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        return torch.jit.script(module)


def traced(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, torch.ones(2, FEATURES))


class WithScript(Classifier):
    """Its step calls a scripted and a traced child before the network."""

    forward = pl.LightningModule.forward

    def __init__(self) -> None:
        super().__init__()
        self.scripted = scripted(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
        self.traced = traced(nn.Linear(FEATURES, FEATURES))

    def training_step(self, batch, batch_idx):
        return super().training_step((self.traced(self.scripted(batch[0])), batch[1]), batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(self.net(self.traced(self.scripted(batch[0]))))


def trained(make, *callbacks) -> Classifier:
    module = seeded(make)
    trainer(*callbacks).fit(module, loader(), loader(2))
    return module


def assert_equal_runs(one: Classifier, other: Classifier) -> None:
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses))
    torch.testing.assert_close(one.validation_outputs, other.validation_outputs)
    torch.testing.assert_close(one.state_dict(), other.state_dict())


def test_script_children_are_no_default_targets():
    callback = InductorCompile(baseline_steps=0, on_error="raise")
    assert_equal_runs(trained(WithScript, callback), trained(WithScript))
    for phase in (callback.report.train, callback.report.infer):
        assert phase.targets == ("net",)
        assert (phase.graphs, phase.graph_breaks, phase.fallbacks) == (1, 0, 0)


@pytest.mark.parametrize("name", ["scripted", "traced", "scripted.forward"])
def test_a_named_script_module_runs_as_it_is_and_is_warned_about(name):
    callback = InductorCompile(targets=[name, "net"], baseline_steps=0)
    with pytest.warns(CompileWarning, match=f"target '{name}' is not compiled: it is a TorchScript module"):
        module = trained(WithScript, callback)
    eager = trained(WithScript)
    assert_equal_runs(module, eager)
    assert callback.report.train.targets == ("net",)
    assert vars(module.scripted).keys() == vars(eager.scripted).keys()


def test_a_run_whose_only_target_is_a_script_module_is_eager():
    callback = InductorCompile(targets="scripted", baseline_steps=0)
    with pytest.warns(CompileWarning, match="target 'scripted' is not compiled"):
        module = trained(WithScript, callback)
    assert_equal_runs(module, trained(WithScript))
    assert callback.report.train.graphs == 0


class Asynchronous(nn.Module):
    """Its forward, or its method, is an async function."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    async def forward(self, x):
        return self.net(x)

    async def encode(self, x):
        return self.net(x)

    async def stream(self, x):
        yield self.net(x)


class AwaitsForward(Classifier):
    forward = pl.LightningModule.forward

    def __init__(self) -> None:
        super().__init__(Asynchronous())

    def called(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        coroutine = self.called(batch[0])
        assert inspect.iscoroutine(coroutine)
        loss = nn.functional.cross_entropy(asyncio.run(coroutine), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.validation_outputs.append(asyncio.run(self.called(batch[0])))


class AwaitsEncode(AwaitsForward):
    def called(self, x):
        return self.net.encode(x)


class Streams(AwaitsForward):
    def called(self, x):
        async def last():
            return [value async for value in self.net.stream(x)][-1]

        return last()


@pytest.mark.parametrize(
    ("make", "targets", "name"),
    [
        (AwaitsForward, None, "net"),
        (AwaitsForward, "net", "net"),
        (AwaitsForward, "net.forward", "net.forward"),
        (AwaitsEncode, "net.encode", "net.encode"),
        (Streams, "net.stream", "net.stream"),
    ],
)
def test_an_async_target_returns_a_coroutine_and_is_warned_about(make, targets, name):
    callback = InductorCompile(targets=targets, baseline_steps=0)
    with pytest.warns(CompileWarning, match=f"target '{name}' is not compiled: its .* is an async function"):
        module = trained(make, callback)
    assert_equal_runs(module, trained(make))
    # The first steps call the module below an async forward too, so it is a default target.
    assert callback.report.train.targets == (("net.net",) if targets is None else ())


def test_an_async_forward_of_the_instance_is_left_as_it_is():
    module = mlp()

    async def patched(x):
        return module[0](x)

    module.forward = patched
    with pytest.warns(CompileWarning, match="target 'forward' is not compiled: its forward is an async function"):
        compile_phases(module)
    assert inspect.iscoroutine(coroutine := module(torch.ones(4, FEATURES)))
    assert asyncio.run(coroutine).shape == (4, 16)
