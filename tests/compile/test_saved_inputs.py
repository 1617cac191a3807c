"""Training graphs that read an input, such as a buffer, and change it."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm

from compile_callbacks import report_of
from tests.cases.zoo import in_checkpoint
from tests.support.models import FEATURES, FLOAT32

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


class Counts(nn.Linear):
    """Writes a buffer, and multiplies by its new value, which the backward pass computes from a copy of the former."""

    def __init__(self):
        super().__init__(FEATURES, FEATURES)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class CopiesBuffer(nn.Module):
    """Multiplies by a copy of a buffer, which is written before the backward pass."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(FEATURES, FEATURES), nn.BatchNorm1d(FEATURES)

    def forward(self, x, update=False):
        y = self.layer(x)
        return self.norm(y) if update else y * self.norm.running_var.clone()


def normed(normalize):
    return nn.Sequential(normalize(nn.Linear(FEATURES, 16)), nn.ReLU(), normalize(nn.Linear(16, FEATURES)))


def updated_by_batch_norm(module, x):
    """The second call writes the running statistics, without raising their versions, as eager batch norm."""
    return module(x) + module(x, update=True)


def updated_by_hand(module, x):
    y = module(x)
    with torch.no_grad():
        module.norm.running_var.mul_(0.5)
    return y


def in_new_step(module, x):
    torch.compiler.cudagraph_mark_step_begin()
    return module(x)


def train(module, calls, run, device):
    """Return the gradients and the buffers of three steps."""
    found, generator = [], torch.Generator().manual_seed(2)
    for _ in range(3):
        module.zero_grad()
        inputs = [torch.randn(6, FEATURES, generator=generator).to(device) for _ in range(calls)]
        sum(run(module, x).square().mean() for x in inputs).backward()
        tensors = [*(parameter.grad for parameter in module.parameters()), *module.buffers()]
        found.append([tensor.detach().clone() for tensor in tensors if tensor is not None])
    return found


MODULES = {
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "spectral norm by hooks": lambda: normed(spectral_norm),
    **{each: functools.partial(ReadsAndWrites, each) for each in ("buffer", "part of a buffer", "weight", "result")},
    "counter": Counts,
    "copy": CopiesBuffer,
}
CHANGED, ONCE, WARN, OFF = list(MODULES)[:6], nn.Module.__call__, {"verify": "warn"}, {"verify": "off"}
ROWS = [
    # name, calls in a step, how, settings
    *[(name, 2, ONCE, WARN) for name in CHANGED],
    *[(name, 1, ONCE, OFF) for name in ("spectral norm", "buffer")],
    *[(name, 2, in_checkpoint, {}) for name in ("spectral norm", "buffer")],
    ("counter", 1, ONCE, {**OFF, "train_mode": "lite"}),  # which runs torch's operators
    ("copy", 1, updated_by_batch_norm, {}),
    ("copy", 2, updated_by_hand, {}),
]
ON_GPU = [(name, 2, ONCE, WARN) for name in CHANGED]
ON_GPU += [(name, 1, in_new_step, {"train_mode": "reduce-overhead"}) for name in CHANGED]


@pytest.mark.parametrize(
    ("device", "name", "calls", "run", "settings"),
    [*(("cpu", *row) for row in ROWS), *(pytest.param("cuda", *row, marks=pytest.mark.gpu) for row in ON_GPU)],
)
def test_gradients_are_right_if_an_input_of_a_graph_is_read_and_changed(compiled, device, name, calls, run, settings):
    eager = MODULES[name]().to(device)
    modules = [copy.deepcopy(eager) for _ in range(2)]
    expected = train(eager, calls, run, device)
    for module in modules:  # the second one gets its code from torch's cache
        torch._dynamo.reset()
        torch.testing.assert_close(train(compiled(module, **settings), calls, run, device), expected, **FLOAT32)
        report = report_of(module).train
        assert (report.graphs >= 1, report.fallbacks) == (True, 0)
