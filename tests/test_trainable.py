"""Parameters that freeze and thaw between the steps of a loop get gradients as they do in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from against_eager import FLOAT32
from torch import nn

from compile_callbacks import compile_phases, restore


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def freeze(net: nn.Sequential) -> None:
    net[1].requires_grad_(False)


def thaw(net: nn.Sequential) -> None:
    net[1].requires_grad_(True)


def replace_by_a_frozen_one(net: nn.Sequential) -> None:
    net[1][0].weight = nn.Parameter(net[1][0].weight.detach() + 1, requires_grad=False)


def put_another_block(net: nn.Sequential) -> None:
    torch.manual_seed(1)
    net[1] = nn.Sequential(nn.Linear(8, 8), nn.ReLU())


@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        ((freeze, thaw, freeze), None),
        ((freeze, thaw, freeze), "repeated"),
        ((replace_by_a_frozen_one, thaw), None),
        ((replace_by_a_frozen_one, thaw), "repeated"),
        ((put_another_block, freeze, thaw), None),
    ],
)
def test_gradients_are_those_of_eager_after_each_change(changes, targets):
    eager = blocks()
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets=targets)
    x = torch.randn(4, 8)
    for change in (lambda net: None, *changes):
        found = []
        for module in (eager, net):
            change(module)
            for _ in range(2):  # in the second call nothing is new
                module.zero_grad()
                module(x).square().sum().backward()
            found.append({name: parameter.grad for name, parameter in module.named_parameters()})
        torch.testing.assert_close(found[1], found[0], **FLOAT32)
    restore(net)
