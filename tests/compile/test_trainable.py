"""Weights that change between the steps of a loop: results and gradients are those of eager."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, restore
from tests.support.against_eager import FLOAT32

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


class Scripted(nn.Sequential):
    def __init__(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(nn.Linear(8, 8), torch.jit.script(nn.Linear(8, 8)))


def trains(path, requires_grad):
    return lambda net: net.get_submodule(path).requires_grad_(requires_grad)


def biases_train(requires_grad):
    return lambda net: [part[0].bias.requires_grad_(requires_grad) for part in net]


def toggle(name):
    return lambda net: net.get_parameter(name).requires_grad_(not net.get_parameter(name).requires_grad)


def cast(name, dtype):
    def change(net):
        net.get_buffer(name).data = net.get_buffer(name).to(dtype)

    return change


def replace_weight(net):
    net[1][0].weight = nn.Parameter(net[1][0].weight.detach() + 1, requires_grad=False)


def replace_block(net):
    torch.manual_seed(1)
    net[1] = block(nn.ReLU)


def replace_by_frozen_block(net):
    torch.manual_seed(1)
    net[1] = block().requires_grad_(False)


def initialize_again(net):
    torch.manual_seed(1)
    net[1][0].__init__(8, 8)


def activate_the_other(net):
    net.active[0] = net.ranks[1]


def register(net):
    net.late.factor = nn.Parameter(torch.full((8,), 2.0))


FREEZES = [trains("1", False), trains("1", True), trains("1", False)]


@pytest.mark.parametrize(
    ("make", "changes", "targets"),
    [
        (blocks, FREEZES, None),
        (blocks, FREEZES, "repeated"),
        (blocks, [replace_weight, trains("1", True)], None),
        (blocks, [replace_weight, trains("1", True)], "repeated"),
        (blocks, [replace_block, *FREEZES], None),
        (blocks, [trains("1", False), replace_by_frozen_block, trains("1", True)], None),
        (blocks, [biases_train(False), trains("", True)], "repeated"),
        (blocks, [initialize_again, toggle("1.0.weight")], None),
        (Turning, [lambda net: None], None),
        (Adapted, [activate_the_other], None),
        (Scripted, [trains("0", False)], None),
        (Late, [register, toggle("late.factor"), toggle("late.factor")], None),
        (Late, [cast("factor", torch.float64), cast("factor", torch.float32)], None),
    ],
)
def test_gradients_equal_eager_after_each_change(make, changes, targets):
    torch.manual_seed(0)
    eager = make()
    net = copy.deepcopy(eager) if make is not Scripted else make()
    net.load_state_dict(eager.state_dict())
    compile_phases(net, train_mode="default", infer_mode=None, targets=targets)
    x = torch.randn(4, 8, requires_grad=True)
    for change in (lambda net: None, *changes):
        for module in (eager, net):
            change(module)
        for _ in range(2):  # nothing is new in the second call
            assert_same_gradients(net, eager, lambda module: module(x))
    restore(net)


def assert_same_gradients(net, eager, call):
    found = []
    for module in (net, eager):
        module.zero_grad()
        call(module).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
    torch.testing.assert_close(*found, **FLOAT32)


def test_a_module_that_repeated_blocks_share_gets_its_gradient_when_it_thaws():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(8, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), self.shared, nn.Tanh()) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    eager = Sharing()
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets="repeated")
    x = torch.randn(4, 8)
    for trained, index in ((True, 0), (True, 1), (False, 1), (True, 0), (True, 1), (False, 0), (False, 2), (True, 2)):
        for module in (eager, net):
            module.shared.requires_grad_(trained)
        assert_same_gradients(net, eager, lambda module, index=index: module.blocks[index](x))
    restore(net)


def test_a_parameter_of_another_module_gets_its_gradient_when_it_thaws():
    class Borrower(nn.Module):
        def __init__(self, lent):
            super().__init__()
            self.own, self.lent = nn.Linear(8, 8), [lent]

        def forward(self, x):
            return self.lent[0](self.own(x))

    lent = nn.Linear(8, 8).requires_grad_(False)
    net, x = compile_phases(Borrower(lent), train_mode="default", infer_mode=None), torch.randn(4, 8)
    net(x).sum().backward()
    assert lent.weight.grad is None
    lent.requires_grad_(True)
    net(x).sum().backward()
    assert lent.weight.grad is not None
    restore(net)


def only(phase):
    return {"train_mode": None, "infer_mode": None, f"{phase}_mode": "default"}


@pytest.mark.parametrize(("phase", "scripted"), [("train", False), ("infer", False), ("infer", True)])
def test_weights_of_another_dtype_are_seen(phase, scripted):
    eager, net = (nn.Sequential(nn.Embedding(5, 8), Scripted() if scripted else nn.Tanh()) for _ in range(2))
    net.load_state_dict(eager.state_dict())
    compile_phases(net, **only(phase))
    x = torch.tensor([0, 3])
    with torch.set_grad_enabled(phase == "train"):
        for change in (nn.Module.float, nn.Module.double, nn.Module.double, nn.Module.float):
            torch.testing.assert_close(change(net)(x), change(eager)(x), **FLOAT32)
    restore(net)


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_buffer_that_is_also_the_input_is_read_after_it_changes(phase):
    class Streaming(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(2, 2))

        def forward(self, x):
            self.state.add_(1)
            return x.t().contiguous().cumsum(0) + 1

    eager, net = Streaming(), compile_phases(Streaming(), **only(phase), verify="off")
    with torch.set_grad_enabled(phase == "train"):
        for own in (False, False, True, True, False, True):
            expected, found = (module(module.state if own else torch.zeros(2, 2)) for module in (eager, net))
            torch.testing.assert_close(found, expected)
    restore(net)
