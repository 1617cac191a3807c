"""How long a module lives that `compile_phases` compiled: as long as with torch's own in-place compile."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, report_of
from tests.support.models import FEATURES, mlp

pytestmark = pytest.mark.all_versions

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


class Encoder(nn.Module):
    """A module of the user's, with a method that is a target."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def encode(self, x):
        return self.net(x).sin()

    def forward(self, x):
        return self.encode(x)


class Folding(nn.Module):
    """Computes from weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.randn(FEATURES, FEATURES)) for _ in range(2))

    def forward(self, x):
        return x @ (self.left @ self.right)


def repeated() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(3)))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (mlp, {}),
        (mlp, {"verify": "off", "targets": ["0", "3"]}),
        (Folding, {"infer_mode": {"fold_weights": True}}),
        (Encoder, {"targets": ["encode"]}),
        (repeated, {"targets": "repeated"}),
    ],
    ids=["module", "parts", "folded", "method", "repeated"],
)
def test_a_dropped_module_is_freed(make, settings):
    module = make()
    compile_phases(module, **settings)
    module(X).sum().backward()
    with torch.no_grad():
        module(X)
    assert report_of(module).train.graphs > 0
    left = [weakref.ref(module), *(weakref.ref(weight) for weight in module.parameters())]
    del module
    gc.collect()
    assert [reference() for reference in left if reference() is not None] == []


def compiled_function():
    module = mlp()
    return compile_phases(lambda x: module(x) * 2), weakref.ref(module)


def test_a_dropped_function_frees_what_it_closes_over():
    call, left = compiled_function()
    call(X)
    del call
    gc.collect()
    assert left() is None


def test_the_report_of_a_module_outlives_it():
    module = mlp()
    compile_phases(module)
    module(X)
    report = report_of(module)
    left = weakref.ref(module)
    del module
    gc.collect()
    assert left() is None
    assert report.train.graphs == 1
