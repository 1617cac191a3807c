"""Transforms of `torch.func` and forward-mode AD around a target, and within it."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import Classifier, loader, seeded, trainer

# What torch itself needs for jvp.
pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:Warning"),
    pytest.mark.usefixtures("no_codegen"),
]


def vmapped(net, x):
    return vmap(net)(x)


def per_sample_gradients(net, x):
    def energy(weights, sample):
        return functional_call(net, weights, (sample,)).square().sum()

    of_samples = vmap(grad(energy), in_dims=(None, 0))(dict(net.named_parameters()), x)
    return net(x) + sum(gradient.norm() for gradient in of_samples.values())


def directional(net, x):
    return sum(jvp(net, (x,), (x.cos(),)))


def jacobian(net, x):
    return net(x) + jacrev(lambda inputs: net(inputs).sum(0))(x).norm()


def dual(net, x):
    with torch.autograd.forward_ad.dual_level():
        return sum(torch.autograd.forward_ad.unpack_dual(net(torch.autograd.forward_ad.make_dual(x, x.cos()))))


class Transformed(Classifier):
    def __init__(self, of):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)))
        self.of = of

    def loss(self, batch):
        return nn.functional.cross_entropy(self.of(self.net, batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss


def losses(of, *callbacks):
    module = seeded(lambda: Transformed(of))
    trainer(*callbacks).fit(module, loader(20))
    return module.losses


@pytest.mark.parametrize("of", [vmapped, per_sample_gradients, directional, jacobian, dual])
def test_a_target_under_a_transform_runs_eagerly_and_says_so(of):
    ours = InductorCompile("default", None, baseline_steps=0, verify="raise", on_error="raise")
    with pytest.warns(
        CompileWarning, match="target 'net' runs eagerly in the train phase when it is called under a transform"
    ) as warned:
        found = losses(of, ours)
    assert found == pytest.approx(losses(of), rel=1e-5)
    assert len([w for w in warned if issubclass(w.category, CompileWarning)]) == 1
    assert ours.report.train.fallbacks == 0
    # Calls that are not transformed are compiled beside those that are.
    assert ours.report.train.graphs == (1 if of in (per_sample_gradients, jacobian) else 0)


@pytest.mark.parametrize("of", [vmapped, per_sample_gradients, directional])
def test_a_target_with_a_transform_in_it_is_compiled(of):
    ours = InductorCompile("default", None, targets="loss", baseline_steps=0, verify="raise", on_error="raise")
    assert losses(of, ours) == pytest.approx(losses(of), rel=1e-4)
    assert ours.report.train.graphs >= 1
    assert ours.report.train.fallbacks == 0
