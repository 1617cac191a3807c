"""Graph passes at every hook point of a run: their flag and phase, their report, the compile cache, and failures."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, InductorConfig, graph_pass
from compile_callbacks.passes.base import HOOK_OPTIONS, graph_kind
from compile_callbacks.passes.manager import pass_options
from compile_callbacks.report.table import to_markdown
from tests.support.models import CLASSES, FEATURES, Classifier, loader, mlp, trainer
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen", "recompiles_at_once")]

TRAIN_KINDS = {
    "pre_grad": {"module"},
    "joint_pre": {"joint"},
    "joint_post": {"joint"},
    "post_grad_pre": {"forward", "backward"},
    "post_grad_post": {"forward", "backward"},
}


class Watch(Uncached):
    """Records the phase, the kind of graph, the flag, and an option of Inductor."""

    def __init__(self, hook="post_grad_post"):
        self.hook = hook
        self.seen = []

    def __call__(self, graph, is_inference):
        option = torch._inductor.config.epilogue_fusion
        self.seen.append((self.phase, graph_kind(self.hook, graph), is_inference, option))


def callback_with(*passes, **kwargs):
    return InductorCompile(passes=list(passes), **{"targets": ["net"], "baseline_steps": 0, "verify": "off", **kwargs})


def watches():
    """One pass at each hook point: they share a run, because compiling takes seconds."""
    return [Watch(hook) for hook in HOOK_OPTIONS]


def test_each_pass_gets_each_graph_with_the_flag_the_phase_and_the_options_of_the_phase():
    passes, infer_only = watches(), Watch()
    modes = {"train_mode": {"options": {"epilogue_fusion": False}}, "infer_mode": InductorConfig(passes=[infer_only])}
    callback, module = callback_with(*passes, **modes), Classifier()
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(2), loader(2))
    for watch in passes:
        inferred = "module" if watch.hook == "pre_grad" else "inference"
        trained = [("train", kind, False, False) for kind in TRAIN_KINDS[watch.hook]]
        assert sorted(watch.seen) == sorted([*trained, ("infer", inferred, True, True)])
        watch.seen.clear()
    trainer(callback).predict(module, loader(2))
    for watch in passes:
        assert [(phase, flag, option) for phase, _, flag, option in watch.seen] == [("infer", True, True)]
    assert infer_only.seen == [("infer", "inference", True, True)] * 2


def test_a_pass_in_options_runs():
    watch = Watch()
    config = InductorConfig(options={"post_grad_custom_post_pass": watch})
    callback = callback_with(train_mode=None, infer_mode=config, on_error="raise")
    trainer(callback).predict(Classifier(), loader(2))
    assert callback.report.infer.graphs == 1
    assert [flag for _, _, flag, _ in watch.seen] == [True]


def test_a_wrong_pass_in_options_is_refused():
    """torch itself accepts a string there, and compiles nothing."""
    with pytest.raises(TypeError, match=r"options\['post_grad_custom_post_pass'\] contains .* is not a graph pass"):
        InductorConfig(options={"post_grad_custom_post_pass": "module:name"})


# ------------------------------------------------------------------------------------------ report and cache


class Doubles(GraphPass):
    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], 4)


class Halves(nn.Module):
    def forward(self, x):
        return x * 2


def test_the_report_has_each_pass_with_its_node_counts():
    callback = callback_with(Watch(), Doubles(), train_mode=None)
    trainer(callback).predict(Classifier(nn.Sequential(mlp(), nn.Softplus(), Halves())), loader(1))
    watch, doubles = callback.report.infer.diagnostics.passes
    assert (watch["name"], watch["changed"], watch["target"]) == ("Watch", False, "net")
    assert (doubles["name"], doubles["changed"], doubles["graph"]) == ("Doubles", True, "inference")
    assert doubles["nodes_before"] == doubles["nodes_after"] == watch["nodes_after"] > 3
    assert watch["seconds"] > 0
    json.dumps(callback.report.to_dict())
    first, second = "Watch: 0 of 1 graphs changed", "Doubles: 1 of 1 graphs changed"
    assert re.search(rf"^  graph passes +{first}\n +{second}$", str(callback.report), re.MULTILINE)
    text = to_markdown(callback.report, {})
    assert "Graph passes" in text
    assert "changed nothing" in text


def test_the_report_distinguishes_a_graph_from_torchs_cache():
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        callback = callback_with(Doubles(), train_mode=None)
        trainer(callback).predict(Classifier(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Tanh())), loader(1))
        (run,) = callback.report.infer.diagnostics.passes
        runs.append(run)
    assert runs[0]["changed"] is False
    assert runs[1] == {"target": "net", "name": "Doubles", "hook": "post_grad_post", "from_cache": True}
    assert re.search(r"graph passes +Doubles: did not run, 1 from the cache$", str(callback.report), re.MULTILINE)
    assert "torch's cache has the graph" in to_markdown(callback.report, {})


class Named(GraphPass):
    def __init__(self, hook, factor):
        self.hook = hook

    def __call__(self, graph, is_inference):
        pass


@pytest.mark.parametrize("hook", ["joint_pre", "post_grad_post"])
def test_equal_passes_hit_torchs_cache_and_another_argument_misses(hook):
    def hits(factor):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            options = pass_options([Named(hook, factor)], "infer")
            torch.compile(lambda x: (x * 2).sin(), options=options)(torch.ones(3))
        return counters["aot_autograd"]["autograd_cache_hit"]

    assert [hits(1), hits(1), hits(2), hits(2)] == [0, 1, 0, 1]


# ------------------------------------------------------------------------------------------ failures


def removes_an_output(graph, is_inference):
    graph.output_node().args = ((),)


def changes_an_output(graph, is_inference):
    output = graph.output_node()
    (value,) = output.args[0]
    with graph.inserting_before(output):
        other = graph.call_function(torch.ops.aten.sum.default, (value,))
    other.meta["val"] = value.meta["val"].sum()
    output.args = ((other,),)


def uses_a_node_of_another_graph(graph, is_inference):
    first, *_ = [node for node in graph.nodes if node.op == "call_function"]
    stranger = torch.fx.Graph().placeholder("stranger")
    first.args = (stranger, *first.args[1:])


WRONG = {
    removes_an_output: "number of the graph's outputs from 1 to 0",
    changes_an_output: r"output 0 from float32\[4, 3\]",
    uses_a_node_of_another_graph: "not well formed: .*stranger",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_graph_is_compiled_without_a_pass_that_makes_it_wrong(function):
    class NotCached(type(graph_pass(function))):
        def uuid(self):
            return None

    module = Classifier()
    expected = trainer().predict(module, loader(1))
    callback = callback_with(NotCached(function), train_mode=None)
    text = f"graph pass '{function.__name__}' at post_grad_post in the infer phase .*{WRONG[function]}"
    with pytest.warns(CompileWarning, match=text):
        predicted = trainer(callback).predict(module, loader(1))
    torch.testing.assert_close(predicted, expected)
    infer = callback.report.infer
    assert (infer.diagnostics.skipped_passes, infer.fallbacks, infer.graphs) == (1, 0, 1)
