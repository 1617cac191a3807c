"""Backward passes that keep their graph, and gradients that are differentiated, compared with eager."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compile_callbacks import CompileWarning, InductorCompile, compile_phases, report_of, restore
from tests.support.models import Classifier, loader, mlp, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

LEFT_EAGER = r"target 'net' runs eagerly in the train phase, because the eager steps differentiate its gradients"


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 3))


class Broken(nn.Module):
    """A graph break, and a view of an intermediate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden.unflatten(1, (4, 4)).flatten(1))


def penalty(net, x, y):
    """The loss of a critic: norms of gradients of inputs."""
    (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def equation(net, x, y):
    """The loss of a differential equation: first and second derivatives."""
    out = net(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return cross_entropy(out, y) + (second + first).square().mean()


def meta(net, x, y):
    """The norm of the gradient of weights."""
    loss = cross_entropy(net(x), y)
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)


def kept(net, x, y):
    """Three backward passes of one graph."""
    out = net(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(out.square().sum(), x, retain_graph=True)[0]
    return cross_entropy(out, y) * (1 + 0.1 * (first.norm() + second.norm()))


class Repeated(Classifier):
    """Trains with a loss that needs several backward passes, from a step on."""

    def __init__(self, loss_of, net, first=0):
        super().__init__(net)
        self.loss_of, self.first = loss_of, first

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        loss = cross_entropy(self.net(x), y) if batch_idx < self.first else self.loss_of(self.net, x, y)
        self.losses.append(loss.item())
        return loss


class ManualBackward(Repeated):
    def __init__(self, *args):
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class OwnBackward(Repeated):
    """Runs each backward pass twice."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


class Physics(Repeated):
    """Its forward differentiates the output of its network, as a physics-informed network does."""

    def forward(self, x):
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return gradient

    def training_step(self, batch, batch_idx):
        loss = self(batch[0].clone().requires_grad_()).square().mean()
        self.losses.append(loss.item())
        return loss


def run(loss_of, make_net, *callbacks, make=Repeated, first=0, steps=6, precision="64-true", **settings):
    """The losses and the final state after a `fit`."""
    module = seeded(lambda: make(loss_of, make_net(), first))
    trainer(*callbacks, precision=precision, **settings).fit(module, loader(steps))
    state = {name: value for name, value in module.state_dict().items() if "num_batches" not in name}
    return torch.tensor(module.losses), state


def compiled(train_mode="default", **settings):
    return InductorCompile(train_mode, None, **{"baseline_steps": 0, "targets": ["net"], "verify": "raise"} | settings)


def assert_same(ours, eager, tolerance=1e-8):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


def plain(net, x, y):
    return cross_entropy(net(x), y)


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("make", "loss_of", "make_net", "settings"),
    [
        (ManualBackward, kept, smooth, {}),
        (ManualBackward, kept, Broken, {}),
        (ManualBackward, kept, blocks, {"targets": ["net.*"]}),
        (Repeated, kept, smooth, {"baseline_steps": 2}),  # the eager steps show that the graph is kept
        (OwnBackward, plain, smooth, {}),
    ],
)
def test_graph_that_is_kept_gives_the_same_gradients_each_time_and_no_warning(make, loss_of, make_net, settings):
    ours = compiled(**settings)
    first = 2 * (make is ManualBackward)
    assert_same(*(run(loss_of, make_net, *callbacks, make=make, first=first) for callbacks in ([ours], [])))
    assert ours.report.train.graphs >= 1
    assert ours.report.train.fallbacks == 0


@pytest.mark.all_versions
def test_hand_written_loop_may_keep_the_graph(tmp_path):
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(seeded(smooth).double()(x).square().sum(), x) * 3
    for hits in (0, 1):  # the second time, the code is from torch's cache
        torch._dynamo.reset()
        net = seeded(smooth).double()
        compile_phases(net, verify="off", cache_dir=tmp_path)
        values = torch.autograd.grad(net(x).square().sum(), x)
        out = net(x)
        values += torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        assert_same(values + torch.autograd.grad(out.square().sum(), x), expected)
        assert report_of(net).train.cache_hits == hits
        restore(net)


@pytest.mark.all_versions
@pytest.mark.parametrize("loss_of", [penalty, equation, meta])
def test_target_whose_gradients_the_eager_steps_differentiate_stays_eager_also_in_a_later_run(loss_of, tmp_path):
    make_net = lambda: nn.Sequential(smooth(), nn.Dropout(0.5))  # noqa: E731
    expected = run(loss_of, make_net, steps=12)
    for baseline_steps in (2, 0):
        ours = compiled(baseline_steps=baseline_steps, cache_dir=tmp_path)
        with pytest.warns(CompileWarning, match=LEFT_EAGER):
            assert_same(run(loss_of, make_net, ours, steps=12), expected)
        train = ours.report.train
        assert (train.graphs, train.fallbacks, train.verdict) == (0, 1, "not compiled")
        assert "explain CC303" in str(ours.report)


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:target .* runs eagerly in the train phase")
@pytest.mark.filterwarnings("ignore:target .* ran in the train phase without a compiled graph")
def test_forward_that_differentiates_its_network_trains_as_in_eager():
    ours = InductorCompile("default", None, baseline_steps=2)
    assert_same(*(run(None, smooth, *callbacks, make=Physics, steps=12) for callbacks in ([ours], [])))


def test_backward_pass_frees_the_inputs_of_its_call():
    net = compile_phases(smooth(), verify="off")
    x = torch.randn(4, 8, requires_grad=True)
    doubled = x * 2
    out, reference = net(doubled), weakref.ref(doubled)
    del doubled
    out.sum().backward()
    assert reference() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
    restore(net)


# ---------------------------------------------------------------------------------------------- on a GPU

on_gpu = {"accelerator": "cuda", "precision": "32-true", "steps": 12}


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("make_net", [smooth, mlp, Broken])
def test_graph_that_is_kept_on_a_gpu(make_net, mode):
    ours = compiled(train_mode=mode)
    of_kept = [run(kept, make_net, *callbacks, make=ManualBackward, **on_gpu) for callbacks in ([ours], [])]
    assert_same(*of_kept, tolerance=5e-3)
    assert ours.report.train.fallbacks == 0
