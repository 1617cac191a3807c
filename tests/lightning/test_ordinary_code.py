"""Code that users write, trained with the callback's default arguments and without it: the same results."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import FEATURES, Classifier, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

STEPS = 24  # 12 of them are eager


class Regression(Classifier):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.losses.append(loss.item())
        return loss

    def loss(self, x):
        return self.net(x).square().mean()


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


class Penalized(Regression):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1)))

    def loss(self, x):
        x = x.clone().requires_grad_()
        output = self.net(x)
        (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def test_a_target_with_dropout_and_a_gradient_penalty_runs_eagerly():
    callback = InductorCompile()
    with pytest.warns(CompileWarning, match=r"target 'net' runs eagerly in the train phase.*create_graph=True.*CC303"):
        _, train = assert_trains_as_eager(Penalized, callback)
    assert (train.graphs, train.fallbacks, train.verdict) == (0, 1, "not compiled")
    assert "explain CC303" in str(callback.report)


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.energy = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.energy(torch.tanh(self.hidden(x)))
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training)
        return energy.square().mean() + force.square().mean()


@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated:compile_callbacks.CompileWarning")
@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly:compile_callbacks.CompileWarning")
@pytest.mark.filterwarnings("ignore:compiled train steps are slower:compile_callbacks.CompileWarning")
def test_a_module_that_computes_gradients_in_its_forward_is_not_traced_in_each_step():
    """Torch 2.15 compiles no graph of it; torch 2.11 compiles the graphs around the gradient."""
    _, train = assert_trains_as_eager(lambda: Regression(Force()))
    traced = [kind for kind in train.diagnostics.series if kind["kind"] == "compiling"]
    assert sum(len(kind["steps"]) for kind in traced) <= 5
    assert train.graphs > 0 or train.fallbacks == 1


class Recurrent(Regression):
    def __init__(self):
        super().__init__(nn.Linear(8, 1))
        self.rnn = nn.GRU(FEATURES, 8, batch_first=True)

    def loss(self, x):
        return super().loss(self.rnn(x[:, None])[0])


def test_an_rnn_is_no_default_target_because_dynamo_compiles_none():
    _, train = assert_trains_as_eager(Recurrent)
    assert train.targets == ("net",)
    assert train.fallbacks == 0


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(FEATURES, 1), []

    def encode(self, x):
        return self.linear(x)

    @functools.lru_cache  # noqa: B019
    def mask(self, size):
        self.calls.append(size)
        return torch.ones(size)


class CallsMethods(Regression):
    def loss(self, x):
        method = self.net.encode
        assert (method.__name__, method.__self__) == ("encode", self.net)
        return self.net.mask(len(x)).mean() * method(x).square().mean()


def test_a_method_that_is_a_target_keeps_its_name_and_a_cached_one_is_called_as_often_as_before():
    compiled, train = assert_trains_as_eager(lambda: CallsMethods(Encoder()))
    assert train.targets == ("net.encode",)
    assert len(compiled.net.calls) == 1
