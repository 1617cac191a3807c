"""What changes of weights between the steps of a loop is seen: gradients and results are those of eager."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, restore
from tests.support.against_eager import FLOAT32

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


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


def assert_gradients_equal_eager(eager: nn.Module, net: nn.Module, changes: Sequence[Any]) -> None:
    """Compare gradients before the first change and after each, in two calls: in the second one nothing is new."""
    x = torch.randn(4, 8, requires_grad=True)
    for change in (lambda net: None, *changes):
        for module in (eager, net):
            change(module)
        for _ in range(2):
            found = []
            for module in (eager, net):
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


@pytest.mark.parametrize("phase", ["train", "infer"])
@pytest.mark.parametrize("scripted", [False, True])
def test_weights_of_another_dtype_are_seen(phase, scripted):
    eager, net = (nn.Sequential(nn.Embedding(5, 8), Scripted() if scripted else nn.Tanh()) for _ in range(2))
    net.load_state_dict(eager.state_dict())
    compile_phases(net, **{"train_mode": None, "infer_mode": None, f"{phase}_mode": "default"}, targets="forward")
    x = torch.tensor([0, 3])
    with torch.set_grad_enabled(phase == "train"):
        for change in (nn.Module.float, nn.Module.double, nn.Module.double, nn.Module.float):
            torch.testing.assert_close(change(net)(x), change(eager)(x), **FLOAT32)
    restore(net)


class Turning(nn.Module):
    """Freezes or thaws its second layer while it is called, behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    @torch.compiler.disable
    def turn(self) -> None:
        self.calls += 1
        self.second.requires_grad_(self.calls % 2 == 0)

    def forward(self, x):
        x = self.first(x)
        self.turn()
        return self.second(x)


class Adapted(nn.Module):
    """Runs one of two adapters, which a list of its own names; they differ in rank."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks = nn.ModuleList([nn.Sequential(nn.Linear(8, rank), nn.Linear(rank, 8)) for rank in (2, 4)])
        self.ranks[0].requires_grad_(False)
        self.active = [self.ranks[0]]

    def forward(self, x):
        return x + self.active[0](x)


class Late(nn.Module):
    """Multiplies by what is registered in a part that has nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.late = nn.Linear(8, 8), nn.Module()

    def forward(self, x):
        x = self.linear(x)
        for factor in self.late._parameters.values():
            x = x * factor
        return x


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("factor", torch.full((8,), 1 / 3))

    def forward(self, x):
        return self.linear(x) * self.factor


class Scripted(nn.Sequential):
    """Holds a part that is compiled by TorchScript."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scripted = torch.jit.script(nn.Linear(8, 8))
        super().__init__(nn.Linear(8, 8), scripted)


def activate_the_other(net: Adapted) -> None:
    net.active[0] = net.ranks[1]


def toggle(name: str):
    def change(net: nn.Module) -> None:
        tensor = net.get_parameter(name)
        tensor.requires_grad_(not tensor.requires_grad)

    return change


def cast(name: str, dtype: torch.dtype):
    def change(net: nn.Module) -> None:
        net.get_buffer(name).data = net.get_buffer(name).to(dtype)

    return change


def register(net: Late) -> None:
    net.late.factor = nn.Parameter(torch.full((8,), 2.0))


def make_anew(net: nn.Sequential) -> None:
    torch.manual_seed(1)
    net[1][0].__init__(8, 8)


def freeze_first(net: nn.Module) -> None:
    next(net.parameters()).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "changes", "targets"),
    [
        (blocks, [freeze, thaw, freeze], None),
        (blocks, [freeze, thaw, freeze], "repeated"),
        (blocks, [replace_by_a_frozen_one, thaw], None),
        (blocks, [replace_by_a_frozen_one, thaw], "repeated"),
        (blocks, [put_another_block, freeze, thaw], None),
        (blocks, [freeze, put_a_frozen_block, thaw], None),
        (blocks, [freeze_biases, thaw_all], "repeated"),
        (blocks, [make_anew, toggle("1.0.weight")], None),
        (Turning, [lambda net: None], None),
        (Adapted, [activate_the_other], None),
        (Scripted, [freeze_first], None),
        (Late, [register, toggle("late.factor"), toggle("late.factor")], None),
        (Buffered, [cast("factor", torch.float64), cast("factor", torch.float32)], None),
    ],
)
def test_gradients_are_those_of_eager_after_each_change(make, changes, targets):
    torch.manual_seed(0)
    eager, net = make(), make()
    net.load_state_dict(eager.state_dict())
    compile_phases(net, train_mode="default", infer_mode=None, targets=targets)
    assert_gradients_equal_eager(eager, net, changes)


class Streaming(nn.Module):
    """Has a state that each call moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 2))

    def forward(self, x):
        self.state.add_(1)
        return x.t().contiguous().cumsum(0) + 1


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_buffer_that_is_the_input_too_and_changes_meanwhile_is_read_after_the_change(phase):
    eager = Streaming()
    modes = {"train_mode": None, "infer_mode": None, f"{phase}_mode": "default"}
    net = compile_phases(Streaming(), **modes, targets="forward", verify="off")
    with torch.set_grad_enabled(phase == "train"):
        for own in (False, False, True, True, False, True):
            expected, found = (module(module.state if own else torch.zeros(2, 2)) for module in (eager, net))
            torch.testing.assert_close(found, expected)
    restore(net)


class Sharing(nn.Module):
    """Blocks that are alike and share a part."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), self.shared, nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_part_that_blocks_share_gets_its_gradient_once_it_thaws_whichever_block_is_called():
    eager = Sharing()
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets="repeated")
    x = torch.randn(4, 8)
    for trained, block in ((True, 0), (True, 1), (False, 1), (True, 0), (True, 1), (False, 0), (False, 2), (True, 2)):
        found = []
        for module in (eager, net):
            module.shared.requires_grad_(trained)
            module.zero_grad()
            module.blocks[block](x).square().sum().backward()
            found.append({name: parameter.grad for name, parameter in module.named_parameters()})
        torch.testing.assert_close(found[1], found[0], **FLOAT32)
    restore(net)
