"""Graph breaks that a setting of Dynamo removes, and modules that would break graphs or recompile without one."""

from __future__ import annotations

import ast
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.graphs.backend import GraphBackend
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.report.summary import next_step, notes
from compile_callbacks.tuning.tuner import Tuner
from compile_callbacks.tuning.tuning_policy import TuningPolicy
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import FEATURES, Classifier, fit, mlp
from tests.support.step_times import Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Item(nn.Module):
    """Multiplies by a number of a tensor, which breaks the graph."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x * (1 + x.sign().max().item()))  # which is 2, so that torch does not recompile


def make():
    return Classifier(Item())


def test_a_setting_of_dynamo_is_in_effect_for_our_compiles_only():
    callback = InductorCompile({"dynamo": {"capture_scalar_outputs": True}}, None, baseline_steps=0)
    assert_fits_as_eager(callback, make=make)
    train = callback.report.train
    assert (train.graphs, train.graph_breaks) == (1, 0)
    assert train.verified == "equal 1"
    assert not torch._dynamo.config.capture_scalar_outputs
    of_user = torch._dynamo.explain(Item())(torch.ones(2, FEATURES))
    assert of_user.graph_break_count == 1


class Counting(nn.Module):
    """Counts its calls, scales by the count, and branches on it."""

    def __init__(self, counts=True):
        super().__init__()
        self.net, self.width, self.calls, self.counts = mlp(), FEATURES, 0, counts

    def forward(self, x):
        x = self.net(x.view(-1, self.width))
        if self.counts:
            self.calls += 1
        return x * (1 + 1 / (2 + self.calls)) if self.calls < 12 else x * 2


def symbolic_inputs(make_net, monkeypatch):
    """Train with the callback, compare with eager, and return the symbolic inputs of each graph."""
    symbols, compile_graph = [], GraphBackend.compile

    def look(backend, graph, inputs):
        values = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        symbols.append([str(value) for value in values if isinstance(value, torch.SymInt)])
        return compile_graph(backend, graph, inputs)

    monkeypatch.setattr(GraphBackend, "compile", look)
    callback = InductorCompile("default", None, baseline_steps=3)
    ours = assert_fits_as_eager(callback, make=lambda: Classifier(make_net()), train=20, validation=None)
    return symbols, callback.report, ours


@pytest.mark.usefixtures("recompiles_at_once")
def test_an_integer_that_changes_in_each_eager_step_becomes_an_input_and_nothing_else_does(monkeypatch):
    symbols, report, ours = symbolic_inputs(Counting, monkeypatch)
    train = report.train
    assert [len(each) for each in symbols] == [0, 1, 1]
    assert (train.graphs, train.fallbacks, ours.net.calls) == (3, 0, 20)  # two of them for the branch
    (event,) = [event for event in train.diagnostics.events if event["kind"] == "dynamo_setting"]
    assert event["reason"] == "allow_unspec_int_on_nn_module is set, because calls changed in its eager calls"
    assert f"train: net: {event['reason']}" in notes(report)
    symbols, report, _ = symbolic_inputs(lambda: Counting(counts=False), monkeypatch)
    assert symbols == [[]]
    assert not [event for event in report.train.diagnostics.events if event["kind"] == "dynamo_setting"]


class Several(Item):
    """Breaks the graph four times. A setting is known for three of them."""

    def forward(self, x):
        x = x * (1 + x.abs().max().item())
        torch._dynamo.graph_break()
        x = x - x[x > 0].mean()
        x = x + torch.arange((x[:, 0] > -100).sum()).sum()
        return self.net(x)


def test_the_report_names_the_settings_that_remove_graph_breaks_and_how_many():
    callback = InductorCompile("default", None, baseline_steps=0)
    fit(callback, make=lambda: Classifier(Several()), validation=None)
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    assert callback.report.train.graph_breaks == 4
    (mode, count), *_ = re.findall(r"train_mode=(\{.*\}\}) may remove (.*)", next_step(callback.report))
    assert (ast.literal_eval(mode), count) == ({"dynamo": settings}, "3 of 4 graph breaks")
    healed = InductorCompile(ast.literal_eval(mode), None, baseline_steps=0)
    fit(healed, make=lambda: Classifier(Several()), validation=None)
    assert healed.report.train.graph_breaks == 1
    assert "may remove" not in next_step(healed.report)


HEALED = "dynamo={'capture_scalar_outputs': True}"


@pytest.mark.parametrize(("healed_ms", "verdict"), [(5, "chosen"), (8.99, "not faster"), (20, "not faster")])
def test_auto_keeps_a_setting_only_if_steps_are_faster_than_with_the_break(monkeypatch, healed_ms, verdict):
    ms = {"eager": 10, "default": 9, HEALED: healed_ms}
    Times(monkeypatch, train=ms)
    monkeypatch.setattr(Tuner, "_why_not_compiled", lambda tuner, trial: None)
    callback = InductorCompile("auto", None)
    assert_fits_as_eager(callback, make=make, train=150, validation=None)
    trials = {trial["candidate"]: trial for trial in callback.report.train.diagnostics.trials}
    assert trials[HEALED]["verdict"] == verdict
    if verdict == "chosen":
        assert trials[HEALED]["reason"] == "capture_scalar_outputs removed 1 of 1 graph breaks: 1.8x"
    assert callback.report.train.mode == (HEALED if verdict == "chosen" else "default")


def test_the_settings_of_a_winner_are_used_by_later_runs(monkeypatch, tmp_path):
    Times(monkeypatch, train={"eager": 10, "default": 9, HEALED: 5})
    monkeypatch.setattr(Tuner, "_why_not_compiled", lambda tuner, trial: None)

    def run(steps):
        callback = InductorCompile("auto", None, cache_dir=tmp_path)
        fit(callback, make=make, train=steps, validation=None)
        trials = {trial["candidate"]: trial for trial in callback.report.train.diagnostics.trials}
        return callback.report.train, trials.get(HEALED, {}).get("reason") or ""

    first, _ = run(150)
    assert first.mode == HEALED
    later, reason = run(20)
    assert (later.mode, later.graph_breaks, reason[:22]) == (HEALED, 0, "won in an earlier run;")
    (record,) = tmp_path.glob("model-*.json")
    data = json.loads(record.read_text())
    (winner,) = data["winners"].values()
    winner["healing"] = ["trace_autograd_ops", 3]
    record.write_text(json.dumps(data))
    assert "won in an earlier run" not in run(150)[1]  # a file cannot set other settings


def test_a_rank_uses_the_settings_that_rank_zero_chose():
    config = InductorConfig(dynamo={"capture_scalar_outputs": True})
    chosen = config.key(), True, ("capture_scalar_outputs",)
    ranks = SimpleNamespace(size=2, gather=lambda mine: [chosen, mine])
    policy = TuningPolicy("infer", Tune("auto"), CompileRecorder(), ranks, lambda line: None)
    policy.begin(torch.device("cpu"), {}, None, no_freezing="a reason", no_cudagraphs=None)
    policy.stage_ends()
    assert policy.chosen.config == config


class TimesBool(Counting):
    """Multiplies a count by a truth value, with which torch 2.11 fails if the count is an input of the graph."""

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (self.calls * self.training)


@pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning")
@pytest.mark.usefixtures("recompiles_at_once")
def test_a_setting_with_which_the_compiler_fails_costs_speed_only():
    callback = InductorCompile("default", None, baseline_steps=3)
    ours = assert_fits_as_eager(callback, make=lambda: Classifier(TimesBool()), train=12, validation=None)
    assert ours.net.calls == 12
    assert callback.report.train.fallbacks == (1 if torch.__version__.startswith("2.11.") else 0)
