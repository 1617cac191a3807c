"""What changes of weights between the steps of a loop is seen: gradients and results are those of eager."""

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


def put_a_frozen_block(net: nn.Sequential) -> None:
    torch.manual_seed(1)
    net[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).requires_grad_(False)


def freeze_biases(net: nn.Sequential) -> None:
    for block in net:
        block[0].bias.requires_grad_(False)


def thaw_all(net: nn.Sequential) -> None:
    net.requires_grad_(True)


@pytest.mark.parametrize(
    ("changes", "targets"),
    [
        ((freeze, thaw, freeze), None),
        ((freeze, thaw, freeze), "repeated"),
        ((replace_by_a_frozen_one, thaw), None),
        ((replace_by_a_frozen_one, thaw), "repeated"),
        ((put_another_block, freeze, thaw), None),
        ((freeze, put_a_frozen_block, thaw), None),
        ((freeze_biases, thaw_all), "repeated"),
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


class Borrower(nn.Module):
    """Computes with a module that is in a list, so that its parameters are none of its own."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(8, 8)
        self.lent = [lent]

    def forward(self, x):
        return self.lent[0](self.own(x))


def test_a_parameter_that_is_not_the_targets_own_gets_its_gradient_once_it_thaws():
    lent = nn.Linear(8, 8).requires_grad_(False)
    net = compile_phases(Borrower(lent), train_mode="default", infer_mode=None)
    x = torch.randn(4, 8)
    net(x).sum().backward()
    assert lent.weight.grad is None
    lent.requires_grad_(True)
    net(x).sum().backward()
    assert lent.weight.grad is not None
    restore(net)


def test_weights_of_another_dtype_are_seen():
    torch.manual_seed(0)
    net = compile_phases(nn.Sequential(nn.Embedding(5, 8), nn.Tanh()), train_mode="default", infer_mode=None)
    x = torch.tensor([0, 3])
    net(x).sum().backward()
    net.double()
    torch.testing.assert_close(net(x), net[0].weight[x].tanh())
    restore(net)
