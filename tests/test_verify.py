"""`verify`: compiled against eager on the first batch, without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from models import FEATURES, Classifier, loader, mlp, seeded, trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import (
    CompileError,
    CompileWarning,
    GraphPass,
    InductorCompile,
    compile_phases,
    report_of,
    restore,
)
from compile_callbacks.compiling.verify import call_and_compare, compare_with_eager, tolerance


class Wrong(GraphPass):
    """Turns ReLU's zero into one, in the graphs of one phase."""

    def __init__(self, phase):
        self.wrong_phase = phase

    def __call__(self, graph, is_inference):
        if self.phase != self.wrong_phase:
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default

    def uuid(self):
        return None


def losses(*callbacks, make=Classifier, **kwargs):
    module = seeded(make)
    trainer(*callbacks, **kwargs).fit(module, loader(6), loader(2))
    return module.losses


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_wrong_result_is_warned_about_and_reported(phase):
    callback = InductorCompile(passes=[Wrong(phase)], baseline_steps=0)
    with pytest.warns(CompileWarning, match=f"does not compute in the {phase} phase what it does eagerly: output 0"):
        losses(callback)
    assert callback.report.phase(phase).verified == "differs"
    assert callback.report.phase(phase).max_abs_error > 0.01
    assert callback.report.phase("infer" if phase == "train" else "train").verified == "equal"


def test_eager_goes_on_eagerly_with_the_right_results():
    callback = InductorCompile(passes=[Wrong("train")], verify="eager", baseline_steps=0)
    with pytest.warns(CompileWarning, match="runs eagerly from here on"):
        assert losses(callback) == losses()
    assert callback.report.train.fallbacks == 1


def test_raise_ends_the_run():
    with pytest.raises(CompileError, match="target 'net' does not compute in the train phase"):
        losses(InductorCompile(passes=[Wrong("train")], verify="raise", baseline_steps=0))


def test_off_compares_nothing():
    callback = InductorCompile(passes=[Wrong("train")], verify="off", baseline_steps=0)
    losses(callback)
    assert callback.report.train.verified is None
    assert callback.report.train.max_abs_error is None


def test_comparing_leaves_the_run_as_it_was():
    def final(verify):
        module = seeded()
        trainer(InductorCompile(verify=verify, baseline_steps=0)).fit(module, loader(6), loader(2))
        return module.state_dict(), torch.get_rng_state()

    (compared, compared_rng), (not_compared, rng) = final("warn"), final("off")
    for key, value in compared.items():
        assert torch.equal(value, not_compared[key]), key
    assert torch.equal(compared_rng, rng)


class WithDropout(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.5), nn.Linear(16, 3)))


def test_dropout_leaves_the_comparison_out_in_training_alone():
    callback = InductorCompile(baseline_steps=0)
    losses(callback, make=WithDropout)
    assert callback.report.train.verified == "left out"
    assert callback.report.infer.verified == "equal"
    [event] = [e for e in callback.report.train.events if e["kind"] == "verify"]
    assert "random numbers" in event["reason"]


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 2


def test_a_gradient_that_differs_is_found():
    net = mlp()
    found = compare_with_eager(net, net, lambda x: HalfGradient.apply(net(x)), (torch.randn(8, FEATURES),), {})
    assert "gradient" in found.problem
    assert found.max_abs_error == 0


def test_gradients_that_are_missing_are_a_difference():
    net = mlp()
    found = compare_with_eager(net, net, lambda x: net(x).detach(), (torch.randn(8, FEATURES),), {})
    assert found.problem == "0 weights get a gradient, with eager 6"


class AtZero(nn.Module):
    """One of fifty values lies as near to the ReLU's zero as the last bit of the inputs reaches."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.tensor([1.0, -1.0]))

    def forward(self, x):
        return torch.relu(x @ self.weights)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_value_that_crosses_a_relus_zero_by_rounding_is_no_difference(wrong):
    module, x = AtZero(), torch.cat([torch.rand(49, 2) + torch.tensor([1.0, 0.0]), torch.tensor([[1 + 2**-23, 1.0]])])
    last_bit = torch.tensor([1 - 2**-22, 1.0])  # below zero now, where no gradient flows
    compared = compare_with_eager(module, module, lambda x: module(x * last_bit * (0.9 if wrong else 1)), (x,), {})
    assert (compared.problem is not None) == wrong


def normed():
    """Both biases before batch norms get gradients that are nothing but rounding."""
    layers = [nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


@pytest.mark.parametrize(
    ("batch", "center", "spread"), [(4096, 0, 1), (4096, 100, 1), (64, 0, 0)], ids=["large", "far from zero", "zeros"]
)
def test_a_gradient_that_is_nothing_but_rounding_is_no_difference(batch, center, spread):
    net = seeded(normed)
    compiled = torch.compile(net)
    for _ in range(4):
        net.load_state_dict(normed().state_dict())
        x = center + spread * torch.randn(batch, FEATURES)
        assert compare_with_eager(net, net, compiled, (x,), {}).problem is None


def test_a_wrong_gradient_beside_such_ones_is_found():
    net, x = seeded(normed), torch.rand(64, FEATURES)
    found = compare_with_eager(net, net, lambda x: net[4:](HalfGradient.apply(net[:4](x))), (x,), {})
    assert found.problem.startswith("the norm of gradient 0 is off by 0.5, ")


def test_a_target_that_takes_no_other_inputs_is_compared_without_them():
    calls = []

    def eager(x):
        calls.append(x)
        if not torch.equal(x, given):
            raise ValueError("no such input")
        return module(x)

    module, given = mlp(), torch.rand(8, FEATURES)
    compared = compare_with_eager(module, eager, lambda x: 2 * module(x), (given,), {})
    assert "output 0" in compared.problem
    assert len(calls) == 4
    assert (calls[1] <= given).all()  # what has to be at most one stays so
    assert not torch.equal(calls[1], given)


def test_gradients_buffers_and_generators_are_as_before():
    net = mlp()
    x = torch.randn(8, FEATURES)
    net(x).sum().backward()
    before, gradients = copy.deepcopy(net.state_dict()), [p.grad.clone() for p in net.parameters()]
    rng = torch.get_rng_state()
    assert compare_with_eager(net, net, net, (x,), {}).problem is None
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), rng)


def test_no_memory_for_it_leaves_it_out():
    def hungry(x):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    found = compare_with_eager(mlp(), hungry, hungry, (torch.ones(2, FEATURES),), {})
    assert "1 TiB" in found.left_out


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_in_both_is_equal(value):
    net = mlp()
    bad = torch.tensor([1.0, value])
    assert compare_with_eager(net, lambda: bad, bad.clone, (), {}).problem is None
    assert compare_with_eager(net, lambda: bad, lambda: torch.ones(2), (), {}).problem is not None


@pytest.mark.parametrize("wrong", [False, True])
def test_a_gradient_that_is_not_finite_in_both_hides_no_other(wrong):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.root, self.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.root.sqrt() + self.scale * x

    net, x = Root(), torch.rand(8)
    found = compare_with_eager(net, net, lambda x: HalfGradient.apply(net(x)) if wrong else net(x), (x,), {})
    assert ("gradient 1 is off by 0.5" in found.problem) if wrong else (found.problem is None)


def test_tolerance_is_half_of_the_digits_of_the_coarsest_arithmetic():
    net = mlp()
    assert tolerance(net, []) == pytest.approx(3.45e-4, rel=1e-2)
    assert tolerance(net.double(), []) == pytest.approx(1.49e-8, rel=1e-2)
    assert tolerance(net, [torch.ones(1, dtype=torch.bfloat16)]) == pytest.approx(0.0884, rel=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert tolerance(net, []) == pytest.approx(0.0884, rel=1e-2)


def test_under_cuda_graphs_outputs_alone_are_compared_in_the_call_itself():
    calls = []
    net = mlp()

    def right(x):
        calls.append("compiled")
        return net(x)

    x = torch.randn(8, FEATURES)
    before = copy.deepcopy(net.state_dict())
    compared, result = call_and_compare(net, net, lambda x: right(x) + 1, (x,), {})
    assert "output 0" in compared.problem
    assert result is None
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    compared, result = call_and_compare(net, net, right, (x,), {})
    assert compared.problem is None
    assert result.requires_grad
    assert calls == ["compiled"] * 2
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])  # as one call would leave it


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x):
        x.add_(1)
        return self.layer(x)


class Momentum(nn.Module):
    """Holds a copy of its net that follows it in each forward pass."""

    def __init__(self):
        super().__init__()
        self.net, self.follower = mlp(), mlp().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for weight, followed in zip(self.follower.parameters(), self.net.parameters(), strict=True):
                weight.mul_(0.5).add_(followed, alpha=0.5)
            there = self.follower(x)
        return self.net(x) + there


def test_a_target_that_writes_to_its_weights_is_left_out():
    module, x = seeded(Momentum), torch.rand(8, FEATURES)
    assert "its own weights" in compare_with_eager(module, module, module, (x,), {}).left_out
    compared, result = call_and_compare(module, module, module, (x,), {})
    assert "its own weights" in compared.left_out
    assert result.requires_grad


class Queue(nn.Module):
    """Compares with a queue, and then moves it along behind a graph break.

    Torch (2.11 to 2.15) keeps the queue for the backward pass instead of its clone, and finds it changed there.
    """

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("queue", torch.randn(16, 3))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        scores = self.net(x)
        near = scores @ self.queue.clone().T
        with torch.no_grad():
            place = int(self.place)
            self.queue[(torch.arange(len(scores)) + place) % 16] = scores
            self.place[0] = (place + len(scores)) % 16
        return scores + near[:, :3]


def with_queue():
    return Classifier(Queue())


def test_compiled_code_that_raises_on_the_first_batch_is_left_to_eager():
    callback = InductorCompile(baseline_steps=0)
    with pytest.warns(
        CompileWarning, match="target 'net' runs eagerly in the train phase, because its compiled code raised"
    ):
        compiled = losses(callback, make=with_queue)
    assert compiled == pytest.approx(losses(make=with_queue))  # validation is compiled, and fills the queue too
    assert callback.report.train.fallbacks == 1


def test_compiled_code_that_raises_on_the_first_batch_ends_the_run_where_that_is_asked_for():
    with pytest.raises(CompileError, match="inplace operation"):
        losses(InductorCompile(baseline_steps=0, on_error="raise"), make=with_queue)


def test_a_target_that_changes_its_input_in_place_does_so_once():
    def make():
        return Classifier(nn.Sequential(nn.Linear(FEATURES, 16), ChangesItsInput()))

    torch.testing.assert_close(
        losses(InductorCompile(targets=["net.1"], baseline_steps=0), make=make), losses(make=make)
    )
    torch.testing.assert_close(losses(InductorCompile(baseline_steps=0), make=make), losses(make=make))


def test_a_target_in_an_activation_checkpoint_is_compared():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x)
    compile_phases(block, verify="raise")
    torch.testing.assert_close(torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), x), expected)
    assert report_of(block).train.verified == "equal"
    restore(block)


def test_a_target_is_compared_where_torch_lets_no_hooks_on_saved_tensors_be_set():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.autograd.graph.disable_saved_tensors_hooks("none are allowed here"):
        compared = compare_with_eager(module, module, module, (torch.ones(2, 4),), {})
    assert (compared.problem, compared.left_out, compared.max_abs_error) == (None, None, 0.0)
