"""The phase switch, without Lightning: what is compiled, for which phase, and what is left behind."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from models import FEATURES, mlp
from torch import nn

from compile_callbacks.compiling.switch import PhaseSwitch
from compile_callbacks.compiling.targets import Target
from compile_callbacks.measuring.events import CompileRecorder
from compile_callbacks.settings.config import InductorConfig

BOTH = {"train": InductorConfig(), "infer": InductorConfig(options={"epilogue_fusion": False})}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return self.body(x) * 2


@pytest.fixture
def recorder():
    recorder = CompileRecorder()
    recorder.listen()
    yield recorder
    recorder.stop()


@pytest.fixture
def switch_on(recorder):
    """Installs a switch that is removed after the test."""
    made = []

    def install(module, configs=None, **named):
        targets = [Target(name, target) for name, target in (named or {"net": module}).items()]
        made.append(PhaseSwitch(targets, configs or BOTH, recorder=recorder))
        made[-1].install()
        return made[-1]

    yield install
    for switch in made:
        switch.remove()


def graphs(recorder, phase):
    return {e.target: e.graphs for e in recorder.of(phase, "compile") if e.graphs}


@pytest.mark.parametrize("make", [mlp, lambda: nn.Linear(FEATURES, 3), Nested], ids=["Sequential", "Linear", "own"])
def test_module_compiles_in_each_phase_and_equals_eager(make, switch_on, recorder):
    net = make()
    x = torch.randn(4, FEATURES)
    expected = copy.deepcopy(net)(x)
    switch = switch_on(net)
    switch.select("train")
    torch.testing.assert_close(net(x), expected)
    assert graphs(recorder, "train") == {"net": 1}
    switch.select("infer")
    net.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(x), net._call_impl(x))
    assert graphs(recorder, "infer") == {"net": 1}
    assert recorder.of("train", "graph_break") == recorder.of("infer", "graph_break") == []


def test_nothing_is_compiled_where_a_phase_has_no_config(switch_on, recorder):
    net = mlp()
    switch = switch_on(net, configs={"train": None, "infer": InductorConfig()})
    switch.select("train")
    net(torch.randn(4, FEATURES))
    assert recorder.events == []


def test_a_target_inside_a_target_is_part_of_its_graph(switch_on, recorder):
    net = Nested()
    switch = switch_on(net, outer=net, inner=net.body)
    switch.select("infer")
    x = torch.randn(4, FEATURES)
    with torch.no_grad():
        net(x)
        assert graphs(recorder, "infer") == {"outer": 1}
        net.body(x)
    assert graphs(recorder, "infer") == {"outer": 1, "inner": 1}
    assert recorder.of("infer", "graph_break") == []


def test_phases_do_not_share_a_recompile_limit(switch_on, recorder):
    net = nn.Linear(FEATURES, 3)
    fixed = {phase: InductorConfig(dynamic=False) for phase in ("train", "infer")}
    switch = switch_on(net, configs=fixed)
    with torch.no_grad():
        for batch in range(2, 8):
            for phase in ("train", "infer"):
                switch.select(phase)
                net(torch.randn(batch, FEATURES))
    for phase in ("train", "infer"):
        assert sum(event.graphs for event in recorder.of(phase, "compile")) == 6


class Broken(nn.Module):
    """Its graph breaks, so that Dynamo keeps graphs on this class's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(FEATURES, 3)

    def forward(self, x):
        x = self.net(x)
        torch._dynamo.graph_break()
        return x + 1


def test_phases_do_not_share_a_recompile_limit_behind_a_graph_break(switch_on, recorder):
    net = Broken()
    fixed = {phase: InductorConfig(dynamic=False) for phase in ("train", "infer")}
    switch = switch_on(net, configs=fixed)
    with torch.no_grad():
        for batch in range(2, 8):
            for phase in ("train", "infer"):
                switch.select(phase)
                net(torch.randn(batch, FEATURES))
    counts = [sum(event.graphs for event in recorder.of(phase, "compile")) for phase in ("train", "infer")]
    assert counts == [12, 12]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_run_their_own_weights(duplicate, switch_on, recorder):
    net = Nested()
    switch = switch_on(net, outer=net, inner=net.body)
    switch.select("infer")
    x = torch.ones(2, FEATURES)
    with torch.no_grad():
        net(x)
        twin = duplicate(net)
        for parameter in twin.parameters():
            parameter.zero_()
        assert twin(x).abs().sum() == 0
        assert twin.body(x).abs().sum() == 0
    assert twin._compiled_call_impl is None


def test_remove_leaves_each_module_as_it_was(switch_on, recorder):
    net = Nested()
    before = [dict(vars(module)) for module in net.modules()]
    switch = switch_on(net, outer=net, inner=net.body)
    assert "_compiled_call_impl" in vars(net)
    switch.remove()
    assert [dict(vars(module)) for module in net.modules()] == before


def test_remove_restores_what_the_user_had_compiled_in_place(switch_on, recorder):
    net = Nested()
    net.compile()
    mine = net._compiled_call_impl
    switch = switch_on(net)
    assert net._compiled_call_impl is not mine
    switch.remove()
    assert net._compiled_call_impl is mine


def test_selecting_by_grad_mode(switch_on, recorder):
    net = mlp()
    switch = switch_on(net)
    switch.select_by_grad_mode()
    x = torch.randn(4, FEATURES)
    net(x)
    assert graphs(recorder, "train") == {"net": 1}
    with torch.no_grad():
        net(x)
    assert graphs(recorder, "infer") == {"net": 1}


class Doubler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def double(self, x):
        return x * self.scale


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_method_is_a_target_too_and_copies_call_their_own(duplicate, switch_on, recorder):
    module = Doubler()
    switch = PhaseSwitch([Target("double", module, "double")], BOTH, recorder=recorder)
    switch.install()
    switch.select("infer")
    with torch.no_grad():
        assert module.double(torch.ones(2)).tolist() == [2, 2]
        twin = duplicate(module)
        twin.scale.zero_()
        assert twin.double(torch.ones(2)).tolist() == [0, 0]
    assert graphs(recorder, "infer") == {"double": 1}
    switch.remove()
    assert "double" not in vars(module)


def test_a_forward_hook_registered_after_compiling_runs(switch_on, recorder):
    net = mlp()
    switch_on(net).select("infer")
    x = torch.randn(4, FEATURES)
    with torch.no_grad():
        plain = net(x)
        handles = [module.register_forward_hook(lambda *_: _[2] * 2) for module in (net, net[3])]
        torch.testing.assert_close(net(x), plain * 4)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(net(x), plain)
