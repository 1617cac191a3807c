"""Backward passes that keep their graph, and gradients that are differentiated, compared with eager."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from compile_callbacks import CompileWarning, InductorCompile, compile_phases, report_of, restore
from tests.support.models import Classifier, Wrapper, loader, mlp, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

LEFT_EAGER = r"target 'net' runs eagerly in the train phase, because the eager steps differentiate its gradients"


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


class Residual(Wrapper):
    def forward(self, x):
        return x + torch.tanh(self.net(x))


def blocks() -> nn.Module:
    layers = (Residual(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))) for _ in range(3))
    return nn.Sequential(*layers, nn.LayerNorm(8), nn.Linear(8, 3))


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

    def __init__(self, loss_of, net, first=0, manual=False):
        super().__init__(net)
        self.loss_of, self.first = loss_of, first
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        loss = cross_entropy(self.net(x), y) if batch_idx < self.first else self.loss_of(self.net, x, y)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


def run(loss_of, make_net, *callbacks, first=0, steps=6, precision="64-true", manual=False, **settings):
    """The losses and the final state after a `fit`."""
    module = seeded(lambda: Repeated(loss_of, make_net(), first, manual))
    trainer(*callbacks, precision=precision, **settings).fit(module, loader(steps))
    state = {name: value for name, value in module.state_dict().items() if "num_batches" not in name}
    return torch.tensor(module.losses), state


def compiled(train_mode="default", **settings):
    return InductorCompile(train_mode, None, **{"baseline_steps": 0, "targets": ["net"], "verify": "raise"} | settings)


def assert_same(ours, eager, tolerance=1e-8):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.all_versions
@pytest.mark.parametrize(("make_net", "targets"), [(smooth, "net"), (Broken, "net"), (blocks, "net.*")])
def test_graph_that_is_kept_gives_the_same_gradients_each_time_and_no_warning(make_net, targets):
    ours = compiled(targets=[targets])
    assert_same(*(run(kept, make_net, *callbacks, first=2, manual=True) for callbacks in ([ours], [])))
    assert ours.report.train.graphs >= 1
    assert ours.report.train.fallbacks == 0


@pytest.mark.all_versions
def test_eager_steps_show_that_automatic_optimization_keeps_a_graph():
    ours = compiled(baseline_steps=2)
    assert_same(run(kept, smooth, ours), run(kept, smooth))
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)


class OwnBackward(Repeated):
    """Runs each backward pass twice."""

    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.all_versions
def test_overridden_backward_may_keep_the_graph():
    def final(*callbacks):
        module = seeded(lambda: OwnBackward(lambda net, x, y: cross_entropy(net(x), y), smooth()))
        trainer(*callbacks, precision="64-true").fit(module, loader(4))
        return torch.tensor(module.losses), module.state_dict()

    ours = compiled()
    assert_same(final(ours), final())
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)


@pytest.mark.all_versions
def test_hand_written_loop_may_keep_the_graph(tmp_path):
    def gradients(x, cache_dir):
        torch._dynamo.reset()
        net = seeded(smooth).double()
        compile_phases(net, verify="off", cache_dir=cache_dir)
        values = *torch.autograd.grad(net(x).square().sum(), x), *kept_gradients(net, x)
        hits = report_of(net).train.cache_hits
        restore(net)
        return values, hits

    def kept_gradients(net, x):
        out = net(x)
        first = torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        return *first, *torch.autograd.grad(out.square().sum(), x)

    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(seeded(smooth).double()(x).square().sum(), x) * 3
    for hits in (0, 1):  # the second time, the code is from torch's cache
        values, cache_hits = gradients(x, tmp_path)
        assert cache_hits == hits
        assert_same(values, expected)


@pytest.mark.all_versions
@pytest.mark.parametrize("loss_of", [penalty, equation, meta])
def test_target_whose_gradients_the_eager_steps_differentiate_stays_eager(loss_of):
    ours = compiled(baseline_steps=2)
    with pytest.warns(CompileWarning, match=LEFT_EAGER):
        assert_same(run(loss_of, smooth, ours, steps=12), run(loss_of, smooth, steps=12))
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (0, 1)


@pytest.mark.all_versions
def test_later_run_knows_that_its_gradients_are_differentiated(tmp_path):
    for baseline_steps in (2, 0):
        ours = compiled(baseline_steps=baseline_steps, cache_dir=tmp_path)
        with pytest.warns(CompileWarning, match=LEFT_EAGER):
            trainer(ours).fit(seeded(lambda: Repeated(penalty, smooth())), loader(12))
        assert ours.report.train.graphs == 0


class Physics(Classifier):
    """Its forward differentiates the output of its network, as a physics-informed network does."""

    def __init__(self):
        super().__init__(smooth())

    def forward(self, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return gradient

    def training_step(self, batch, batch_idx):
        loss = self(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:target .* runs eagerly in the train phase")
@pytest.mark.filterwarnings("ignore:target .* ran in the train phase without a compiled graph")
def test_forward_that_differentiates_its_network_trains_as_in_eager():
    losses = []
    for callbacks in ([InductorCompile("default", None, baseline_steps=2)], []):
        module = seeded(Physics)
        trainer(*callbacks).fit(module, loader(12))
        losses.append(torch.tensor(module.losses))
    assert_same(*losses, tolerance=1e-5)


def per_sample(net, x, y):
    """The loss of the compiled network, and gradients of single samples by `torch.func`, which trains nothing."""
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    gradients = torch.func.grad(lambda given: torch.func.functional_call(net, given, (x[:1],)).sum())(weights)
    return cross_entropy(net(x), y) + 0 * sum(gradient.sum() for gradient in gradients.values())


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly in the train phase when it is called under a transform")
def test_gradients_of_torch_func_leave_other_calls_compiled():
    ours = compiled(baseline_steps=2)
    assert_same(run(per_sample, smooth, ours, steps=12), run(per_sample, smooth, steps=12))
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.tanh(self.first(x)) * torch.sin(self.second(y)) + y


def test_backward_pass_frees_the_inputs_of_its_call():
    net = Two()
    compile_phases(net, verify="off")
    x = torch.randn(4, 8, requires_grad=True)
    shifted = x * 2
    out, reference = net(x, shifted), weakref.ref(shifted)
    del shifted
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
    of_kept = [run(kept, make_net, *callbacks, manual=True, **on_gpu) for callbacks in ([ours], [])]
    assert_same(*of_kept, tolerance=5e-3)
    assert ours.report.train.fallbacks == 0
