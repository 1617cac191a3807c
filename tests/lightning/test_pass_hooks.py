"""Passes at every hook point of a real run: the flag and phase they are told, and what is reported of them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compile_callbacks import CompileError, CompileWarning, GraphPass, InductorCompile, graph_pass
from compile_callbacks.passes.hooks import HOOK_OPTIONS, graph_kind
from compile_callbacks.passes.manager import pass_options
from compile_callbacks.report.table import to_markdown
from tests.support.models import CLASSES, FEATURES, Classifier, loader, mlp, trainer
from tests.support.processes import run_in_new_process
from tests.support.uncached import Uncached

pytestmark = pytest.mark.usefixtures("no_codegen")

TRAINED = {
    "pre_grad": {"module"},
    "joint_pre": {"joint"},
    "joint_post": {"joint"},
    "post_grad_pre": {"forward", "backward"},
    "post_grad_post": {"forward", "backward"},
}


class Watch(Uncached):
    """Keeps the phase, what the graph holds, and the flag."""

    def __init__(self, hook):
        self.hook = hook
        self.seen = []

    def __call__(self, graph, is_inference):
        self.seen.append((self.phase, graph_kind(self.hook, graph), is_inference))


def ours(*passes, **kwargs):
    return InductorCompile(passes=list(passes), **{"targets": ["net"], "baseline_steps": 0, "verify": "off", **kwargs})


def watches():
    """One pass at each hook point: they share a run, since compiling takes seconds."""
    return [Watch(hook) for hook in HOOK_OPTIONS]


@pytest.mark.all_versions
def test_one_pass_in_both_phases_of_a_fit_is_told_right():
    trainer(ours(*(passes := watches()))).fit(Classifier(), loader(2), loader(1))
    for watch in passes:
        inferred = "module" if watch.hook == "pre_grad" else "inference"
        trained = {("train", kind, False) for kind in TRAINED[watch.hook]}
        assert set(watch.seen) == trained | {("infer", inferred, True)}


@pytest.mark.all_versions
def test_predict_is_inference():
    passes = watches()
    trainer(ours(*passes)).predict(Classifier(), loader(1))
    assert [{(phase, flag) for phase, _, flag in watch.seen} for watch in passes] == [{("infer", True)}] * len(passes)


class FrozenPart(Classifier):
    """A part of which nothing is trained: an inference graph in the train phase, by torch's definition."""

    def __init__(self):
        super().__init__(nn.Linear(FEATURES, FEATURES).requires_grad_(False))
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])


@pytest.mark.all_versions
def test_a_frozen_module_in_training_is_inference_in_the_train_phase():
    trainer(ours(*(passes := watches()))).fit(FrozenPart(), loader(2))
    assert [{(phase, flag) for phase, _, flag in watch.seen} for watch in passes] == [{("train", True)}] * len(passes)


@pytest.mark.all_versions
def test_handed_straight_to_torch_it_is_told_too():
    passes = watches()
    options = {HOOK_OPTIONS[watch.hook]: watch for watch in passes}
    function = torch.compile(lambda x: (x * 2).sin(), options=options)
    with torch.no_grad():
        function(torch.ones(3))
    assert [{flag for _, _, flag in watch.seen} for watch in passes] == [{True}] * len(passes)
    for watch in passes:
        watch.seen.clear()
    function(torch.ones(3, requires_grad=True)).sum().backward()
    for watch in passes:
        assert {(phase, flag) for phase, _, flag in watch.seen} == {(None, False)}
        assert {kind for _, kind, _ in watch.seen} == TRAINED[watch.hook]


# ------------------------------------------------------------------------------------------ what is reported


class Doubles(GraphPass):
    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], 4)


class Halves(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.all_versions
def test_order_time_and_node_counts_are_in_the_report():
    class Halved(Classifier):
        def __init__(self):
            super().__init__(nn.Sequential(mlp(), nn.Softplus(), Halves()))

    callback = ours(Watch("post_grad_post"), Doubles(), train_mode=None)
    trainer(callback).predict(Halved(), loader(1))
    watch, doubles = callback.report.infer.diagnostics.passes
    assert (watch["name"], watch["changed"], watch["target"]) == ("Watch", False, "net")
    assert (doubles["name"], doubles["changed"], doubles["graph"]) == ("Doubles", True, "inference")
    assert doubles["nodes_before"] == doubles["nodes_after"] == watch["nodes_after"] > 3
    assert watch["seconds"] > 0
    json.dumps(callback.report.to_dict())
    text = to_markdown(callback.report, {})
    assert "Graph passes" in text
    assert "changed nothing" in text


@pytest.mark.all_versions
def test_a_graph_of_torchs_cache_is_told_from_one_without_a_match():
    runs = []
    for _ in range(2):
        torch._dynamo.reset()
        callback = ours(Doubles(), train_mode=None)
        trainer(callback).predict(Classifier(nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Tanh())), loader(1))
        (run,) = callback.report.infer.diagnostics.passes
        runs.append(run)
    assert runs[0]["changed"] is False
    assert runs[1] == {"target": "net", "name": "Doubles", "hook": "post_grad_post", "from_cache": True}
    assert "came from torch's cache" in to_markdown(callback.report, {})


class Named(GraphPass):
    def __init__(self, hook, factor):
        self.hook = hook

    def __call__(self, graph, is_inference):
        pass


@pytest.mark.all_versions
@pytest.mark.parametrize("hook", HOOK_OPTIONS)
def test_the_same_setup_hits_torchs_cache_and_another_argument_misses(hook):
    def hits(factor):
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            options = pass_options([Named(hook, factor)], "infer")
            torch.compile(lambda x: (x * 2).sin(), options=options)(torch.ones(3))
        return counters["aot_autograd"]["autograd_cache_hit"]

    assert [hits(1), hits(1), hits(2), hits(2)] == [0, 1, 0, 1]


SCRIPT = """
import torch
from compile_callbacks import GraphPass
from compile_callbacks.passes.manager import pass_options
from torch._dynamo.utils import counters

class First(GraphPass):
    def __call__(self, graph, is_inference):
        pass

with torch.no_grad():
    torch.compile(lambda x: x * 2, options=pass_options([First()], "infer"))(torch.ones(3))
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_another_process_hits_torchs_cache():
    assert [int(run_in_new_process(SCRIPT).split()[-1]) for _ in range(2)] == [0, 1]


# ------------------------------------------------------------------------------------------ passes that are wrong


def returns(graph, is_inference):
    return graph


def removes_an_output(graph, is_inference):
    graph.output_node().args = ((),)


def changes_an_output(graph, is_inference):
    output = graph.output_node()
    (value,) = output.args[0]
    with graph.inserting_before(output):
        other = graph.call_function(torch.ops.aten.sum.default, (value,))
    other.meta["val"] = value.meta["val"].sum()
    output.args = ((other,),)


def leaves_a_node_dangling(graph, is_inference):
    first, *_ = [node for node in graph.nodes if node.op == "call_function"]
    stranger = torch.fx.Graph().placeholder("stranger")
    first.args = (stranger, *first.args[1:])


def adds_an_input(graph, is_inference):
    with graph.inserting_before(next(iter(graph.nodes))):
        graph.placeholder("another")


def raises(graph, is_inference):
    raise KeyError("a key that is not there")


WRONG = {
    returns: "returned Graph: a pass changes the graph in place",
    removes_an_output: "number of the graph's outputs from 1 to 0",
    changes_an_output: r"output 0 from float32\[4, 3\]",
    leaves_a_node_dangling: "not well formed: .*stranger",
    adds_an_input: "changed the graph's inputs",
    raises: "raised KeyError",
}


@pytest.mark.all_versions
@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_pass_that_is_wrong_is_left_out_or_named(function):
    class Never(type(graph_pass(function))):
        def uuid(self):
            return None

    module = Classifier()
    expected = trainer().predict(module, loader(1))
    callback = ours(Never(function), train_mode=None)
    name = function.__name__
    said = f"graph pass '{name}' at post_grad_post in the infer phase .*{WRONG[function]}"
    with pytest.warns(CompileWarning, match=said):
        predicted = trainer(callback).predict(module, loader(1))
    torch.testing.assert_close(predicted, expected)
    infer = callback.report.infer
    assert (infer.diagnostics.skipped_passes, infer.fallbacks, infer.graphs) == (1, 0, 1)
    with pytest.raises(CompileError, match=said):
        trainer(ours(Never(function), train_mode=None, on_error="raise")).predict(module, loader(1))


@pytest.mark.all_versions
def test_a_pass_that_cannot_be_copied_is_taken_by_reference():
    class Uncopyable(torch._inductor.custom_graph_pass.CustomGraphPass):
        calls = 0

        def __call__(self, graph):
            Uncopyable.calls += 1

        def uuid(self):
            return None

        def __deepcopy__(self, memo):
            raise TypeError("not me")

    trainer(ours(Uncopyable(), train_mode=None)).predict(Classifier(), loader(1))
    assert Uncopyable.calls == 1
