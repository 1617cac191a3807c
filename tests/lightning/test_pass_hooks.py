"""Graph passes at every hook point of a run: their flag and phase, their report, the compile cache, and failures."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compile_callbacks import CompileError, CompileWarning, GraphPass, InductorCompile, InductorConfig, graph_pass
from compile_callbacks.passes.base import HOOK_OPTIONS, graph_kind
from compile_callbacks.passes.manager import pass_options
from compile_callbacks.report.table import to_markdown
from tests.support.models import CLASSES, FEATURES, Classifier, loader, mlp, trainer
from tests.support.processes import run_in_new_process
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

TRAIN_KINDS = {
    "pre_grad": {"module"},
    "joint_pre": {"joint"},
    "joint_post": {"joint"},
    "post_grad_pre": {"forward", "backward"},
    "post_grad_post": {"forward", "backward"},
}


class Watch(Uncached):
    """Records the phase, the kind of graph, and the flag."""

    def __init__(self, hook="post_grad_post"):
        self.hook = hook
        self.seen = []

    def __call__(self, graph, is_inference):
        self.seen.append((self.phase, graph_kind(self.hook, graph), is_inference))


def callback_with(*passes, **kwargs):
    return InductorCompile(passes=list(passes), **{"targets": ["net"], "baseline_steps": 0, "verify": "off", **kwargs})


def watches():
    """One pass at each hook point: they share a run, because compiling takes seconds."""
    return [Watch(hook) for hook in HOOK_OPTIONS]


def test_passes_get_the_flag_and_the_phase_in_a_fit_and_in_predict():
    trainer(callback_with(*(passes := watches()))).fit(Classifier(), loader(2), loader(1))
    for watch in passes:
        inferred = "module" if watch.hook == "pre_grad" else "inference"
        trained = {("train", kind, False) for kind in TRAIN_KINDS[watch.hook]}
        assert set(watch.seen) == trained | {("infer", inferred, True)}
    trainer(callback_with(*(passes := watches()))).predict(Classifier(), loader(1))
    assert [{(phase, flag) for phase, _, flag in watch.seen} for watch in passes] == [{("infer", True)}] * len(passes)


class FrozenPart(Classifier):
    """A target without trainable weights: its graph in the train phase is an inference graph for torch."""

    def __init__(self):
        super().__init__(nn.Linear(FEATURES, FEATURES).requires_grad_(False))
        self.head = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])


def test_a_frozen_module_in_training_has_an_inference_graph_in_the_train_phase():
    trainer(callback_with(*(passes := watches()))).fit(FrozenPart(), loader(2))
    assert [{(phase, flag) for phase, _, flag in watch.seen} for watch in passes] == [{("train", True)}] * len(passes)


def test_passes_in_the_options_of_torch_compile_get_the_flag():
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
        assert {kind for _, kind, _ in watch.seen} == TRAIN_KINDS[watch.hook]


watch_by_path = Watch()


@pytest.mark.parametrize("separator", [":", "."])
def test_a_pass_in_options_runs_by_its_import_path(separator):
    """torch itself accepts a string there, and compiles nothing."""
    config = InductorConfig(options={"post_grad_custom_post_pass": f"{__name__}{separator}watch_by_path"})
    assert config.options["post_grad_custom_post_pass"] is watch_by_path
    watch_by_path.seen.clear()
    callback = callback_with(train_mode=None, infer_mode=config, on_error="raise")
    trainer(callback).predict(Classifier(), loader(2))
    assert callback.report.infer.graphs == 1
    assert [flag for _, _, flag in watch_by_path.seen] == [True]


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("module_that_is_missing:see", ValueError, "'module_that_is_missing:see'"),
        (f"{__name__}:missing", ValueError, f"'{__name__}:missing'"),
        ("see", ValueError, "'see'"),
        (3, TypeError, "contains 3, which is not a graph pass"),
        (f"{__name__}:TRAIN_KINDS", TypeError, "which is not a graph pass"),
    ],
)
def test_a_wrong_pass_in_options_is_refused(value, error, text):
    with pytest.raises(error, match=rf"options\['post_grad_custom_post_pass'\].*{text}"):
        InductorConfig(options={"post_grad_custom_post_pass": value})


@pytest.mark.parametrize("function", [3, lambda graph: None, lambda a, b, c: None])
def test_a_function_that_does_not_take_graph_and_flag_is_refused(function):
    with pytest.raises(TypeError, match="function="):
        graph_pass(function)


def test_an_unknown_hook_point_is_refused():
    with pytest.raises(ValueError, match="did you mean 'post_grad_pre'"):
        graph_pass(hook="post_grad_per")(lambda graph, is_inference: None)
    with pytest.raises(ValueError, match=r"Wrong\.hook='never'"):
        type("Wrong", (GraphPass,), {"hook": "never"})


class OfTorch(torch._inductor.custom_graph_pass.CustomGraphPass):
    """A pass of torch's own class, which cannot be copied."""

    calls = 0

    def __call__(self, graph):
        OfTorch.calls += 1

    def uuid(self):
        return None

    def __deepcopy__(self, memo):
        raise TypeError("not me")


def test_passes_of_torchs_own_classes_run_by_reference():
    trainer(callback_with(OfTorch(), train_mode=None)).predict(Classifier(), loader(1))
    assert OfTorch.calls == 1
    base = getattr(torch._inductor.custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if base is None:  # torch 2.11
        return
    seen = []
    body = {"__call__": lambda self, graph, is_inference: seen.append(is_inference), "uuid": lambda self: None}
    with torch.no_grad():
        torch.compile(lambda x: x * 5, options=pass_options((type("Aware", (base,), body)(),), "infer"))(torch.ones(3))
    assert seen == [True]


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
    assert "came from torch's cache" in to_markdown(callback.report, {})


class Named(GraphPass):
    def __init__(self, hook, factor):
        self.hook = hook

    def __call__(self, graph, is_inference):
        pass


@pytest.mark.parametrize("hook", HOOK_OPTIONS)
def test_equal_passes_hit_torchs_cache_and_another_argument_misses(hook):
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


def test_another_process_hits_torchs_cache(tmp_path):
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert [int(run_in_new_process(SCRIPT, environment=environment).split()[-1]) for _ in range(2)] == [0, 1]


# ------------------------------------------------------------------------------------------ failures


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


def uses_a_node_of_another_graph(graph, is_inference):
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
    uses_a_node_of_another_graph: "not well formed: .*stranger",
    adds_an_input: "changed the graph's inputs",
    raises: "raised KeyError",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_graph_is_compiled_without_a_pass_that_fails(function):
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
    if function is raises:
        with pytest.raises(CompileError, match=text):
            trainer(callback_with(NotCached(function), train_mode=None, on_error="raise")).predict(module, loader(1))
