"""Training graphs that read an input, such as a buffer, and change it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import report_of
from tests.support.against_eager import FLOAT32
from tests.support.models import FEATURES

pytestmark = pytest.mark.all_versions


class ReadsAndWrites(nn.Module):
    """Multiplies by a buffer or a weight, and changes it before or after."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(FEATURES))
        self.register_buffer("decay", torch.ones(FEATURES))
        self.register_buffer("last", torch.zeros(6, FEATURES))

    def forward(self, x):
        y = self.layer(x)
        with torch.no_grad():
            if self.change == "part of a buffer":
                self.decay[:3].mul_(0.9)
        z = (y * self.decay.clone() * self.scale.clone()).sin()
        with torch.no_grad():
            if self.change == "buffer":
                self.decay.mul_(0.9)
            elif self.change == "weight":
                self.scale.mul_(0.9)
            elif self.change == "result":
                self.last.copy_(z)
        return z.exp()


def normed(normalize):
    return nn.Sequential(normalize(nn.Linear(FEATURES, 16)), nn.ReLU(), normalize(nn.Linear(16, FEATURES)))


MODULES = {
    "spectral norm": lambda: normed(nn.utils.parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: normed(nn.utils.spectral_norm),
    **{
        change: functools.partial(ReadsAndWrites, change)
        for change in ("buffer", "part of a buffer", "weight", "result")
    },
}


def results_of(module):
    """Return copies of the gradients and the buffers."""
    tensors = [*(parameter.grad for parameter in module.parameters()), *module.buffers()]
    return [tensor.detach().clone() for tensor in tensors if tensor is not None]


def train(module, calls, run=lambda module, x: module(x)):
    """Return the gradients and the buffers of three steps."""
    found = []
    generator = torch.Generator().manual_seed(2)
    device = next(module.parameters()).device
    for _ in range(3):
        module.zero_grad()
        inputs = [torch.randn(6, FEATURES, generator=generator).to(device) for _ in range(calls)]
        sum(run(module, x).square().mean() for x in inputs).backward()
        found.append(results_of(module))
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("verify", ["warn", "off"])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_right_if_a_graph_reads_and_changes_an_input(compiled, name, calls, verify, device):
    eager = MODULES[name]().to(device)
    modules = [copy.deepcopy(eager) for _ in range(2)]
    expected = train(eager, calls)
    for module in modules:  # the second one gets its code from torch's cache
        torch._dynamo.reset()
        torch.testing.assert_close(train(compiled(module, verify=verify), calls), expected, **FLOAT32)
        report = report_of(module).train
        assert (report.graphs >= 1, report.fallbacks) == (True, 0)


class Counts(nn.Module):
    """Writes a buffer, and multiplies by its new value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) * self.calls


def test_gradients_are_right_in_the_mode_lite(compiled):
    """It runs torch's operators. The backward pass computes the new value again from a copy of the former value."""
    module = Counts()
    eager = copy.deepcopy(module)
    torch.testing.assert_close(train(compiled(module, train_mode="lite", verify="off"), 1), train(eager, 1), **FLOAT32)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_right_within_an_activation_checkpoint(compiled, name):
    eager = MODULES[name]()
    module = copy.deepcopy(eager)

    def run(target, x):
        return checkpoint(target, x, use_reentrant=False)

    torch.testing.assert_close(train(compiled(module), 2, run), train(eager, 2, run), **FLOAT32)


class CopiesBuffer(nn.Module):
    """Multiplies by a copy of a buffer, which is written before the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)

    def forward(self, x, update=False):
        y = self.layer(x)
        return self.norm(y) if update else y * self.norm.running_var.clone()


def update_by_batch_norm(module, x):
    """The second call writes the running statistics, without raising their versions, as eager batch norm."""
    return module(x) + module(x, update=True)


def update_by_hand(module, x):
    y = module(x)
    with torch.no_grad():
        module.norm.running_var.mul_(0.5)
    return y


@pytest.mark.parametrize("run", [update_by_batch_norm, update_by_hand])
@pytest.mark.parametrize("calls", [1, 2])
def test_gradients_are_right_if_a_copied_buffer_is_written_after_the_call(compiled, run, calls):
    eager = CopiesBuffer()
    module = copy.deepcopy(eager)
    torch.testing.assert_close(train(compiled(module), calls, run), train(eager, calls, run), **FLOAT32)
    assert report_of(module).train.fallbacks == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_right_with_cuda_graphs_if_a_graph_reads_and_changes_an_input(compiled, name):
    eager = MODULES[name]().cuda()
    module = copy.deepcopy(eager)

    def run(target, x):
        torch.compiler.cudagraph_mark_step_begin()
        return target(x)

    found = train(compiled(module, train_mode="reduce-overhead"), 1, run)
    torch.testing.assert_close(found, train(eager, 1), **FLOAT32)
    assert report_of(module).train.graphs >= 1
