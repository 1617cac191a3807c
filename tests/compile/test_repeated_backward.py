"""Backward passes of compiled targets that keep their graph, or are differentiated themselves, against eager."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from compile_callbacks import CompileError, CompileWarning, InductorCompile, compile_phases, restore
from tests.support.models import Classifier, loader, mlp, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

DIFFERENTIATED = r"gradients of target 'net' are differentiated in the (train|infer) phase \(create_graph=True\)"


def smooth(inner: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), inner or nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))


class Block(nn.Module):
    """What is repeated: its input goes on beside what it computes."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Broken(nn.Module):
    """A graph break, and a view of an intermediate."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden.unflatten(1, (4, 4)).flatten(1))


class Spectral(nn.Module):
    """Computes with a buffer that it changes, as spectral norm does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.register_buffer("u", torch.ones(8))

    def forward(self, x):
        self.u.mul_(0.9)
        return torch.tanh(self.linear(x * self.u))


class TwoViews(nn.Module):
    """Outputs that share memory which is none of its inputs'."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x):
        out = torch.tanh(self.linear(x))
        return out.view(-1), out.view(-1, 3)


class Passing(nn.Module):
    """Its second graph hands on what the first one computed, as it is and as a view."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 3), nn.Linear(3, 3)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return hidden.view(-1), hidden, torch.tanh(self.second(hidden))


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
    def __init__(self, loss_of, net, every=1):
        super().__init__(net)
        self.loss_of, self.every = loss_of, every

    def training_step(self, batch, batch_idx):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        loss = cross_entropy(self.net(x), y) if batch_idx % self.every else self.loss_of(self.net, x, y)
        self.losses.append(loss.item())
        return loss


def run(loss_of, make_net, *callbacks, every=1, steps=6, precision="64-true", **settings):
    module = seeded(lambda: Repeated(loss_of, make_net(), every))
    trainer(*callbacks, precision=precision, **settings).fit(module, loader(steps))
    state = {name: value for name, value in module.state_dict().items() if "num_batches" not in name}
    return module.losses, state


def compiled(train_mode="default", **settings):
    return InductorCompile(train_mode, None, **{"baseline_steps": 0, "targets": ["net"], "verify": "raise"} | settings)


def same(ours, eager, tolerance=1e-8):
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(eager[0]), rtol=tolerance, atol=tolerance)
    for name, value in eager[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=tolerance, atol=tolerance)


@pytest.mark.all_versions
@pytest.mark.parametrize("loss_of", [equation, meta])
def test_gradients_of_a_compiled_target_can_be_differentiated(loss_of):
    ours = compiled()
    with pytest.warns(CompileWarning, match=DIFFERENTIATED) as said:
        found = run(loss_of, smooth, ours)
    same(found, run(loss_of, smooth))
    assert len([warning for warning in said if issubclass(warning.category, CompileWarning)]) == 1
    assert ours.report.train.graphs == 1
    assert ours.report.train.fallbacks == 0


@pytest.mark.all_versions
def test_a_graph_that_is_kept_gives_the_same_gradients_each_time_and_no_warning():
    ours = compiled()
    same(run(kept, smooth, ours), run(kept, smooth))
    assert ours.report.train.graphs == 1


@pytest.mark.all_versions
@pytest.mark.parametrize("make_net", [mlp, Broken], ids=["running statistics", "graph break"])
@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_with(make_net):
    same(run(both, make_net, compiled()), run(both, make_net))


@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_under_autocast():
    ours = run(both, smooth, compiled(verify="off"), precision="bf16-mixed")
    same(ours, run(both, smooth, precision="bf16-mixed"), tolerance=0.03)


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:gradients of target:compile_callbacks.CompileWarning")
def test_of_repeated_blocks():
    def blocks():
        return nn.Sequential(Block(), Block(), Block(), nn.LayerNorm(8), nn.Linear(8, 3))

    same(run(both, blocks, compiled(targets="repeated")), run(both, blocks))


@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_of_inputs_whose_sizes_are_symbols():
    def unequal(loss_of, *callbacks):
        module = seeded(lambda: Repeated(loss_of, smooth()))
        for batch_size in (4, 6, 3, 5):
            trainer(*callbacks, precision="64-true").fit(module, loader(2, batch_size))
        return module.losses, module.state_dict()

    same(unequal(both, compiled()), unequal(both))


@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_steps_that_do_not_ask_for_it_are_compiled_all_the_same():
    ours = compiled()
    same(run(penalty, smooth, ours, every=3), run(penalty, smooth, every=3))
    assert ours.report.train.graphs == 1


@pytest.mark.parametrize(
    ("make_net", "why"),
    [
        (lambda: smooth(nn.Dropout(0.5)), "draws random numbers"),
        (Spectral, "changes an input, such as a buffer, that it computes with"),
    ],
)
def test_what_cannot_be_computed_once_more_ends_the_run_with_what_to_do(make_net, why):
    with pytest.warns(CompileWarning, match=DIFFERENTIATED), pytest.raises(CompileError, match=why) as raised:
        run(penalty, make_net, compiled(verify="off"))
    assert "leave it out of targets, or train eagerly (train_mode=None)" in str(raised.value)


def test_random_numbers_are_drawn_as_if_it_had_not_been_tried():
    net = smooth(nn.Dropout(0.5))
    compile_phases(net, verify="off")
    x = torch.randn(4, 8, requires_grad=True)
    out = net(x)
    before = torch.get_rng_state()
    with pytest.warns(CompileWarning), pytest.raises(CompileError, match="draws random numbers"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)
    restore(net)


@pytest.mark.all_versions
@pytest.mark.parametrize("make_net", [TwoViews, Passing])
@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_of_several_outputs(make_net):
    def loss_of(net, x, y):
        *others, last = net(x)
        (gradient,) = torch.autograd.grad(sum(out.square().sum() for out in others), x, create_graph=True)
        (of_last,) = torch.autograd.grad(last.sum(), x, create_graph=True)
        return cross_entropy(last, y) + gradient.norm() + of_last.square().sum()

    same(run(loss_of, make_net, compiled()), run(loss_of, make_net))


class Two(nn.Module):
    """Takes two inputs; the second is of the first's size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        return torch.tanh(self.first(x)) * torch.sin(self.second(y)) + y


def gradients_of(net, call, prepare=lambda net: None):
    """Gradients of the weights, of a loss on the gradient of what the net is called with."""
    prepare(net)
    x = torch.linspace(-1, 1, 32, dtype=torch.float64).view(4, 8).requires_grad_()
    out, of = call(net, x)
    gradients = torch.autograd.grad(out.square().sum(), of, create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()
    return [*(gradient.detach() for gradient in gradients), x.grad, *(weight.grad for weight in net.parameters())]


def other_input(net, x):
    return net(x, torch.tanh(2 * x)), [x]


def of_itself(net, x):
    return net(net(x, x), x), list(net.parameters())


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
@pytest.mark.parametrize("call", [other_input, of_itself, hooked, checkpointed])
@pytest.mark.filterwarnings("ignore:gradients of target:compile_callbacks.CompileWarning")
def test_what_inputs_were_computed_from_counts_once(call):
    eager = torch.manual_seed(0) and Two().double()
    ours = copy.deepcopy(eager)
    compile_phases(ours, verify="off")
    for found, expected in zip(gradients_of(ours, call), gradients_of(eager, call), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    restore(ours)


def bias_changed(net, x):
    out = net(x, x)
    net.second.bias.data.add_(0)
    with torch.no_grad():
        net.second.bias.add_(1)
    return out, [x]


def frozen_after(net, x):
    out = net(x, x)
    net.first.requires_grad_(False)
    return out, [x]


def activation_changed(net, x):
    h = x * 1.5
    out = net(x, h)
    h.add_(out)
    return h, [x]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


class Own(Two):
    def forward(self, x, y):
        return super().forward(Square.apply(torch.tanh(x)), y)


class AddsABuffer(Two):
    """Both that change the buffer and that add it to something are `add_`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("u", torch.ones(8))

    def forward(self, x, y):
        self.u.add_(0.5)
        return super().forward(x, y * 1).add_(self.u).square()


class NormsWhatItChanges(Two):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x, y):
        z = y.detach()
        z.add_(z * z)
        return super().forward(x, self.norm(z))


@pytest.mark.parametrize(
    ("make_net", "call", "why"),
    [
        (Two, bias_changed, "an input, a weight or a buffer was changed after the call"),
        (Two, frozen_after, "requires_grad of an input or a weight was changed after the call"),
        (Two, activation_changed, "was changed after the call"),
        (Own, other_input, "there is a torch.autograd.Function in it"),
        (AddsABuffer, other_input, "changes an input, such as a buffer, that it computes with"),
        (NormsWhatItChanges, other_input, "changes an input, such as a buffer, that it computes with"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(make_net, call, why):
    net = make_net().double()
    compile_phases(net, verify="off")
    with pytest.warns(CompileWarning, match="are differentiated"), pytest.raises(CompileError, match=why):
        gradients_of(net, call)
    restore(net)


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_a_gradient_penalty_may_begin_at_any_step():
    class LatePenalty(Repeated):
        def training_step(self, batch, batch_idx):
            self.every = 1 if batch_idx >= 110 else 1000
            return super().training_step(batch, batch_idx + 1)

    def train(*callbacks):
        module = seeded(lambda: LatePenalty(penalty, smooth()))
        trainer(*callbacks, precision="64-true").fit(module, loader(115))
        return module.losses, module.state_dict()

    ours = compiled()
    same(train(ours), train())
    assert ours.report.train.fallbacks == 0


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


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:gradients of target:compile_callbacks.CompileWarning")
def test_a_target_that_differentiates_by_itself():
    class Whole(Repeated):
        def training_step(self, batch, batch_idx):
            loss = self.loss_of(self.net, batch[0].clone().requires_grad_(), batch[1])
            self.record(loss)
            return loss

        @torch.compiler.disable
        def record(self, loss):
            self.losses.append(loss.item())

    def losses(*callbacks):
        module = seeded(lambda: Whole(penalty, smooth()))
        trainer(*callbacks, precision="64-true").fit(module, loader(5))
        return module.losses

    ours = compiled(targets=["training_step"], verify="off")
    torch.testing.assert_close(torch.tensor(losses(ours)), torch.tensor(losses()), rtol=1e-6, atol=1e-6)
    assert ours.report.train.recompiles == 0
    assert ours.report.train.fallbacks == 0


@pytest.mark.all_versions
@pytest.mark.filterwarnings("ignore:gradients of target:compile_callbacks.CompileWarning")
def test_in_validation():
    class Forces(Classifier):
        def validation_step(self, batch, batch_idx):
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                out = self.net(x)
                (kept_one,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
                (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.sum(), x)
            self.validation_outputs.append(torch.stack([kept_one, first.detach(), second]))

    def outputs(*callbacks):
        module = seeded(lambda: Forces(smooth()))
        trainer(*callbacks, inference_mode=False, precision="64-true").validate(module, loader(3), verbose=False)
        return module.validation_outputs

    ours = InductorCompile(None, "default", targets=["net"], verify="off")
    torch.testing.assert_close(outputs(ours), outputs(), rtol=1e-9, atol=1e-9)
    assert ours.report.infer.graphs == 1


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("loss_of", [penalty, equation, meta, kept])
@pytest.mark.parametrize("make_net", [smooth, mlp, Broken], ids=["smooth", "running statistics", "graph break"])
@pytest.mark.filterwarnings("ignore:gradients of target 'net' are differentiated")
def test_on_a_gpu(make_net, loss_of, mode):
    ours = compiled(train_mode=mode)
    same(
        run(loss_of, make_net, ours, accelerator="cuda", precision="32-true", steps=12),
        run(loss_of, make_net, accelerator="cuda", precision="32-true", steps=12),
        tolerance=5e-3,
    )
    assert ours.report.train.fallbacks == 0


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_random_numbers_on_a_gpu(mode):
    net = smooth(nn.Dropout(0.5))
    with pytest.warns(CompileWarning, match=DIFFERENTIATED), pytest.raises(CompileError, match="draws random numbers"):
        run(penalty, lambda: net, compiled(train_mode=mode, verify="off"), accelerator="cuda", precision="32-true")
    ours = compiled(train_mode=mode, verify="off")
    losses, _ = run(kept, lambda: net, ours, accelerator="cuda", precision="32-true", steps=12)
    assert len(losses) == 12
