"""Guards on weights in the place of torch's: what they see, and that torch's are left out where they are looked at."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from against_eager import FLOAT32
from torch import nn

from compile_callbacks import _torch, compile_phases, report_of, restore
from compile_callbacks.compiling.weight_guards import WeightGuards, difference, replaced


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def weight_as(net: nn.Module, data: torch.Tensor) -> None:
    net[0].weight.data = data


CHANGES = {
    "'0.bias' no longer requires grad": lambda net: net[0].bias.requires_grad_(False),
    "dtype of '0.weight': torch.float64, was torch.float32": lambda net: weight_as(net, torch.zeros(4, 4).double()),
    "shape of '0.weight': torch.Size([3, 4]), was torch.Size([4, 4])": lambda net: weight_as(net, torch.zeros(3, 4)),
    "memory layout of '0.weight': (1, 4), was (4, 1)": lambda net: weight_as(net, torch.zeros(4, 4).t()),
    "device of '0.weight': meta, was cpu": lambda net: net.to("meta"),
    "dtype of '1.running_mean': torch.float64, was torch.float32": lambda net: net[1].double(),
    "same as of '2.weight': 0, was 7": lambda net: setattr(net[2], "weight", net[0].weight),
    "'2.scale' is new": lambda net: net[2].register_parameter("scale", nn.Parameter(torch.ones(4))),
    "'2.bias' is gone": lambda net: setattr(net[2], "bias", None),
    "'1.0.weight' is new": lambda net: net.__setitem__(1, nn.Sequential(nn.Linear(4, 4))),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_a_graph_depends_on_is_seen_and_named(words):
    net = small()
    guards = WeightGuards(net)
    assert guards.changed()
    assert not guards.changed()
    before = guards.state
    with torch.no_grad():
        CHANGES[words](net)
    assert guards.changed()
    assert not guards.changed()
    # A batch norm that is converted has weights first; any of them is a reason.
    expected = words if "running_mean" not in words else words.replace("running_mean", "weight")
    assert difference(before, guards.state) == expected


@pytest.mark.parametrize(
    "harmless",
    [
        lambda net: net[0].weight.add_(1),
        lambda net: weight_as(net, torch.zeros(4, 4)),
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.zeros(4, 4))),
        lambda net: net.__setitem__(0, nn.Linear(4, 4)),
        lambda net: net.eval(),
    ],
    ids=["in place", "through data", "a new parameter", "a new module", "eval"],
)
def test_other_values_need_no_other_graph_and_what_is_new_is_watched_from_then_on(harmless):
    net = small()
    guards = WeightGuards(net)
    guards.changed()
    with torch.no_grad():
        harmless(net)
    assert not guards.changed()
    net[0].weight.requires_grad_(False)
    assert guards.changed()


@pytest.mark.parametrize(
    "context",
    [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad, torch.enable_grad],
)
def test_modes_of_the_call_are_no_change_of_the_weights(context):
    net = small()
    guards = WeightGuards(net)
    guards.changed()
    with context():
        assert not guards.changed()
    assert not guards.changed()


def test_weights_that_are_no_plain_tensors_are_left_to_torch():
    net = small()
    net.lazy = nn.LazyLinear(3)
    net.register_buffer("sparse", torch.eye(4).to_sparse())
    net.register_buffer("jagged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))
    guards = WeightGuards(net)
    assert guards.changed()
    assert not guards.changed()
    assert {name for name, _ in guards.state} == {
        *(f"{i}.{name}" for i in (0, 1, 2) for name in ("weight", "bias")),
        *(f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
    }
    assert len(replaced([guards])) == 9


def test_torch_has_no_guards_on_weights_that_are_looked_at_and_keeps_all_others():
    net = small()
    lent = nn.Linear(4, 4)
    guards = WeightGuards(net)
    guards.changed()
    keep = _torch.without_tensor_guards("region_module", functools.partial(replaced, [guards]))
    left_out, kept = [], []

    def spy(entries):
        answers = keep(entries)
        for entry, answer in zip(entries, answers, strict=True):
            (kept if answer else left_out).append((entry.guard_type, entry.name))
        return answers

    def region(region_module, x, others):
        return others[0](region_module(x))

    compiled = _torch.compile_function(region, lambda graph, _: graph, fullgraph=True, dynamic=None, guard_filter=spy)
    compiled(net, torch.randn(2, 4), [lent])
    assert {kind for kind, _ in left_out} == {"TENSOR_MATCH"}
    assert len(left_out) == 9
    assert sum(kind == "TENSOR_MATCH" for kind, _ in kept) == 3  # the input, and the weight and bias of what is lent


def gradients(net: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
    net.zero_grad()
    net(x).square().sum().backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def test_networks_that_are_frozen_in_turn_are_compiled_once_for_each_turn_and_the_reason_is_told():
    eager = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets="forward")
    x = torch.randn(2, 4)
    for turn in (0, 1, 0, 1):
        found = []
        for module in (eager, net):
            module[turn].requires_grad_(False)
            module[1 - turn].requires_grad_(True)
            found.append(gradients(module, x))
        torch.testing.assert_close(found[1], found[0], **FLOAT32)
    said = report_of(net).train
    assert said.graphs == 2
    reasons = [event["reason"] for event in said.events if event["kind"] == "recompile"]
    assert reasons == ["'0.weight' now requires grad"]
    restore(net)


@torch._dynamo.config.patch(recompile_limit=2)
def test_more_states_than_torch_compiles_for_are_left_to_torchs_own_guards():
    torch.manual_seed(0)
    eager = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets="forward")
    x = torch.randn(2, 4)
    for frozen in (None, 0, 1, 2, 0, None):
        found = []
        for module in (eager, net):
            module.requires_grad_(True)
            if frozen is not None:
                module[frozen].requires_grad_(False)
            found.append(gradients(module, x))
        torch.testing.assert_close(found[1], found[0], **FLOAT32)
    assert report_of(net).train.graphs == 4  # two without guards on weights, two with
    restore(net)


class ThawsOnTheWay(nn.Module):
    """Freezes or thaws its second layer while it is called, behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    @torch.compiler.disable
    def turn(self) -> None:
        self.calls += 1
        self.second.requires_grad_(self.calls % 2 == 0)

    def forward(self, x):
        x = self.first(x)
        self.turn()
        return self.second(x)


def test_what_changes_between_a_graph_break_and_the_rest_of_the_call_is_seen():
    torch.manual_seed(0)
    eager = ThawsOnTheWay()
    # Compared calls would be further calls, each of which turns it once more.
    net = compile_phases(copy.deepcopy(eager), train_mode="default", infer_mode=None, targets="forward", verify="off")
    x = torch.randn(2, 4)
    for _ in range(4):
        torch.testing.assert_close(gradients(net, x), gradients(eager, x), **FLOAT32)
    restore(net)


def test_inference_sees_weights_of_another_dtype():
    net = compile_phases(nn.Sequential(nn.Embedding(5, 8), nn.Tanh()), train_mode=None, infer_mode="default")
    x = torch.tensor([0, 3])
    with torch.no_grad():
        net(x)
        net.double()
        torch.testing.assert_close(net(x), net[0].weight[x].tanh())
    restore(net)
