"""Modules for the tests of `InductorBackend`: one counts its runs, and has state that a backend must not change."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, mlp

RUNS = []


@torch.library.custom_op("compile_callbacks_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    """Count executions, also in compiled code, but not traces."""
    RUNS.append(tuple(x.shape))
    return x.clone()


@counted.register_fake
def _(x):
    return torch.empty_like(x)


class Model(nn.Module):
    """Has state that inference must not change: a dropout, a batch norm, and a buffer that each call replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(mlp(), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=None):
        assert x.shape[0] != 13, "thirteen, by design"
        self.calls = self.calls + 1
        out = self.net(counted(x))
        return out if scale is None else out * scale


def batch(size=4):
    return torch.linspace(-1, 1, size * FEATURES).reshape(size, FEATURES)


def eagerly(*args, **kwargs):
    with torch.no_grad():
        return Model().eval()(*args, **kwargs)


def linear():
    torch.manual_seed(0)
    return nn.Linear(FEATURES, CLASSES)


def state_of(module):
    """The attributes, the training flags and the weights of a module and its submodules."""
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return [set(vars(part)) for part in module.modules()], [part.training for part in module.modules()], weights


def assert_same_state(module, before):
    after = state_of(module)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)


class Scaled(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = mlp()
        self.wide = nn.Linear(CLASSES, width)

    def forward(self, x, scale):
        return self.wide(self.net(x)) * scale
