"""Backward passes of compiled targets that keep their graph or are differentiated, compared with eager."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from compile_callbacks import CompileError, CompileWarning, InductorCompile, compile_phases, restore
from tests.support.models import Classifier, Wrapper, loader, mlp, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

DIFFERENTIATED = r"gradients of target 'net' are differentiated in the (train|infer) phase \(create_graph=True\)"
expected_warning = pytest.mark.filterwarnings("ignore:gradients of target .* are differentiated")


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


def both(net, x, y):
    """Passes that keep their graph, and gradients that are differentiated."""
    return kept(net, x, y) + penalty(net, x, y)


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


def run(loss_of, make_net, *callbacks, first=0, steps=6, precision="64-true", **settings):
    """The losses and the final state after a `fit`."""
    module = seeded(lambda: Repeated(loss_of, make_net(), first))
    trainer(*callbacks, precision=precision, **settings).fit(module, loader(steps))
    state = {name: value for name, value in module.state_dict().items() if "num_batches" not in name}
    return torch.tensor(module.losses), state


def compiled(train_mode="default", **settings):
    return InductorCompile(train_mode, None, **{"baseline_steps": 0, "targets": ["net"], "verify": "raise"} | settings)


def assert_same(ours, eager, tolerance=1e-8):
    torch.testing.assert_close(ours, eager, rtol=tolerance, atol=tolerance)


@pytest.mark.all_versions
@pytest.mark.parametrize("loss_of", [equation, meta])
def test_gradients_of_a_compiled_target_can_be_differentiated(loss_of):
    ours = compiled()
    with pytest.warns(CompileWarning, match=DIFFERENTIATED) as caught:
        found = run(loss_of, smooth, ours)
    assert_same(found, run(loss_of, smooth))
    assert len([warning for warning in caught if issubclass(warning.category, CompileWarning)]) == 1
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)


@pytest.mark.all_versions
def test_a_graph_that_is_kept_gives_the_same_gradients_each_time_and_no_warning():
    ours = compiled()
    assert_same(run(kept, smooth, ours), run(kept, smooth))
    assert ours.report.train.graphs == 1


@pytest.mark.all_versions
@pytest.mark.parametrize(("make_net", "targets"), [(Broken, "net"), (blocks, "net.*")])
@expected_warning
def test_graph_breaks_and_several_targets_may_be_differentiated(make_net, targets):
    assert_same(run(both, make_net, compiled(targets=[targets])), run(both, make_net))


@pytest.mark.all_versions
@expected_warning
def test_a_gradient_penalty_may_begin_at_any_step():
    ours = compiled()
    assert_same(run(penalty, smooth, ours, first=110, steps=115), run(penalty, smooth, first=110, steps=115))
    assert (ours.report.train.graphs, ours.report.train.fallbacks) == (1, 0)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.tanh(self.first(x)) * torch.sin(self.second(y)) + y


def gradients_of(net, call):
    """Gradients of the weights, of a loss on the gradient of the net's inputs."""
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).requires_grad_()
    out, of = call(net, x)
    gradients = torch.autograd.grad(out.square().sum(), of, create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return [*(gradient.detach() for gradient in gradients), x.grad, *(weight.grad for weight in net.parameters())]


def other_input(net, x):
    return net(x, torch.tanh(2 * x)), [x]


def hooked(net, x):
    h = torch.tanh(x)
    h.register_hook(lambda gradient: 2 * gradient)
    h.retain_grad()
    return net(h, x), [x]


def checkpointed(net, x):
    out = checkpoint(net, x, x.cos(), use_reentrant=False)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    return out * first, [x]


@pytest.mark.all_versions
@pytest.mark.parametrize("call", [other_input, hooked, checkpointed])
@expected_warning
def test_the_computation_of_the_inputs_counts_once(call):
    eager = torch.manual_seed(0) and Two().double()
    ours = copy.deepcopy(eager)
    compile_phases(ours, verify="off")
    assert_same(gradients_of(ours, call), gradients_of(eager, call))
    restore(ours)


def test_a_backward_pass_frees_the_inputs_of_its_call():
    net = Two()
    compile_phases(net, verify="off")
    x = torch.randn(4, 8, requires_grad=True)
    shifted = x * 2
    out, reference = net(x, shifted), weakref.ref(shifted)
    del shifted
    out.sum().backward()
    assert reference() is None
    with pytest.warns(CompileWarning), pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    restore(net)


def bias_changed(net, x):
    out = net(x, x)
    net.second.bias.data.add_(0)
    with torch.no_grad():
        net.second.bias.add_(1)
    return out, [x]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class CustomFunction(Two):
    def forward(self, x, y):
        return super().forward(Square.apply(torch.tanh(x)), y)


class Dropout(Two):
    def forward(self, x, y):
        return super().forward(x, nn.functional.dropout(y))


class AddsABuffer(Two):
    """Both the change of the buffer and its use are `add_`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("u", torch.ones(8))

    def forward(self, x, y):
        self.u.add_(0.5)
        return super().forward(x, y * 1).add_(self.u).square()


@pytest.mark.parametrize(
    ("make_net", "call", "reason"),
    [
        (Two, bias_changed, "an input, a weight or a buffer was changed after the call"),
        (CustomFunction, other_input, "its graph contains a torch.autograd.Function"),
        (Dropout, other_input, "draws random numbers"),
        (AddsABuffer, other_input, "its graph reads and changes an input, such as a buffer"),
    ],
)
def test_a_second_computation_with_other_results_is_refused(make_net, call, reason):
    net = make_net().double()
    compile_phases(net, verify="off")
    states = []

    def forward(net, x):
        out = call(net, x)
        states.append(torch.get_rng_state())
        return out

    with pytest.warns(CompileWarning, match="differentiated"), pytest.raises(CompileError, match=reason) as raised:
        gradients_of(net, forward)
    assert "leave the target out of targets, or train eagerly (train_mode='eager')" in str(raised.value)
    assert torch.equal(torch.get_rng_state(), states[0])  # also if the second computation drew random numbers
    restore(net)


# ---------------------------------------------------------------------------------------------- on a GPU

on_gpu = {"accelerator": "cuda", "precision": "32-true", "steps": 12}


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("loss_of", [penalty, equation, meta, kept])
@pytest.mark.parametrize("make_net", [smooth, mlp, Broken])
@expected_warning
def test_on_a_gpu(make_net, loss_of, mode):
    ours = compiled(train_mode=mode)
    assert_same(run(loss_of, make_net, ours, **on_gpu), run(loss_of, make_net, **on_gpu), tolerance=5e-3)
    assert ours.report.train.fallbacks == 0
