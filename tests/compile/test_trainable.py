"""Weights that change between the steps of a loop: results and gradients are those of eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, restore
from tests.support.against_eager import assert_same_gradients
from tests.support.models import seeded

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def block(activation=nn.Tanh):
    return nn.Sequential(nn.Linear(8, 8), activation())


def blocks():
    return nn.Sequential(*(block() for _ in range(3)))


class Turning(nn.Module):
    """Freezes or thaws its second layer in each call, behind a graph break."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    @torch.compiler.disable
    def turn(self):
        self.calls += 1
        self.second.requires_grad_(self.calls % 2 == 0)

    def forward(self, x):
        x = self.first(x)
        self.turn()
        return self.second(x)


class Adapted(nn.Module):
    """Runs one of two adapters of different ranks, which is in a list."""

    def __init__(self):
        super().__init__()
        self.ranks = nn.ModuleList([nn.Sequential(nn.Linear(8, rank), nn.Linear(rank, 8)) for rank in (2, 4)])
        self.ranks[0].requires_grad_(False)
        self.active = [self.ranks[0]]

    def forward(self, x):
        return x + self.active[0](x)


class Late(nn.Module):
    """Multiplies by a parameter that is registered later, and by a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.late = nn.Linear(8, 8), nn.Module()
        self.register_buffer("factor", torch.full((8,), 1 / 3))

    def forward(self, x):
        x = self.linear(x) * self.factor
        for factor in self.late._parameters.values():
            x = x * factor
        return x


def trains(path, requires_grad):
    return lambda net: net.get_submodule(path).requires_grad_(requires_grad)


def cast(name, dtype):
    def change(net):
        net.get_buffer(name).data = net.get_buffer(name).to(dtype)

    return change


def replace_weight(net):
    net[1][0].weight = nn.Parameter(net[1][0].weight.detach() + 1, requires_grad=False)


def replace_block(net):
    torch.manual_seed(1)
    net[1] = block(nn.ReLU)


def activate_the_other(net):
    net.active[0] = net.ranks[1]


def register(net):
    net.late.factor = nn.Parameter(torch.full((8,), 2.0))


FREEZES = [trains("1", False), trains("1", True), trains("1", False)]


@pytest.mark.parametrize(
    ("make", "changes", "targets"),
    [
        (blocks, FREEZES, None),
        (blocks, FREEZES, ["[0-9]"]),
        (blocks, [replace_weight, trains("1", True)], ["[0-9]"]),
        (blocks, [replace_block, *FREEZES], None),
        (Turning, [lambda net: None], None),
        (Adapted, [activate_the_other], None),
        (Late, [register, trains("late", False), trains("late", True)], None),
        (Late, [cast("factor", torch.float64), cast("factor", torch.float32)], None),
    ],
)
def test_gradients_equal_eager_after_each_change(make, changes, targets):
    eager = seeded(make)
    net = copy.deepcopy(eager)
    compile_phases(net, train_mode="default", infer_mode=None, targets=targets)
    x = torch.randn(4, 8, requires_grad=True)
    for change in (lambda net: None, *changes):
        for module in (eager, net):
            change(module)
        for _ in range(2):  # nothing is new in the second call
            assert_same_gradients(net, eager, x)
    restore(net)
