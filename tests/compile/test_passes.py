"""Graph passes: their flag and phase, their report, the helpers, failures, and their identity in torch's cache."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from compile_callbacks import CompileWarning, GraphPass, InductorCompile, InductorConfig, graph_pass
from compile_callbacks.passes import RecordGraphs, call_before, count_ops, find_nodes, replace_node
from tests.cases.zoo import Calls
from tests.support.models import Classifier, loader, mlp, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen", "recompiles_at_once")]

aten = torch.ops.aten
KINDS = {"pre_grad": ["module"], "joint_pre": ["joint"], "joint_post": ["joint"]}
KINDS |= {"post_grad_pre": ["backward", "forward"], "post_grad_post": ["backward", "forward"]}
"""The kinds of training graphs, by hook point."""


class Watch(RecordGraphs):
    """Records also the phase, the kind of graph, the flag, and an option of Inductor."""

    def __init__(self, folder=None, hook="post_grad_post"):
        super().__init__(folder, hook=hook)
        self.seen = []

    def __call__(self, graph, is_inference):
        super().__call__(graph, is_inference)
        self.seen.append((self.phase, self.graphs[-1].kind, is_inference, torch._inductor.config.epilogue_fusion))


class Scale(GraphPass):
    """Multiplies by another factor wherever a graph multiplies."""

    def __init__(self, factor, hook="post_grad_post"):
        self.factor, self.hook = factor, hook

    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            node.args = (node.args[0], self.factor)


def callback_with(*passes, **settings):
    return InductorCompile(passes=passes, **{"targets": ["net"], "baseline_steps": 0, "verify": "off", **settings})


def texts(logger):
    """The texts of TensorBoard's text tab, by tag."""
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    tags = {tag.removesuffix("/text_summary"): tag for tag in events.Tags()["tensors"]}
    return {name: str(events.Tensors(tag)[-1].tensor_proto.string_val) for name, tag in tags.items()}


def test_each_pass_gets_each_graph_with_its_flag_phase_and_options_and_the_report_has_it(tmp_path):
    watches, infer_only, logger = [Watch(tmp_path / hook, hook) for hook in KINDS], Watch(), TensorBoardLogger(tmp_path)
    infer = InductorConfig(passes=[infer_only, Scale(4)])
    callback = callback_with(*watches, train_mode={"options": {"epilogue_fusion": False}}, infer_mode=infer)
    module = Classifier(Calls(mlp(), lambda net, x: net(x) * 2))
    trainer(callback, num_sanity_val_steps=0, logger=logger).fit(module, loader(2), loader(2))
    for watch in watches:
        inferred = "module" if watch.hook == "pre_grad" else "inference"
        trained = [("train", kind, False, False) for kind in KINDS[watch.hook]]
        assert sorted(watch.seen) == [("infer", inferred, True, True), *trained]
    graphs = "000_train_forward", "001_train_backward", "002_infer_inference"
    titles = [f"{name}_post_grad_pre" for name in graphs]
    assert sorted(path.stem for path in (tmp_path / "post_grad_pre").iterdir()) == titles
    text = (tmp_path / "post_grad_pre" / f"{titles[0]}.txt").read_text()
    assert 'primals_1: "f32[16, 8]"' in text
    assert "addmm" in text
    logged = texts(logger)
    assert {f"graphs/{title}" for title in titles} <= set(logged)
    assert "Graph passes" in logged["compile_report"]
    assert "changed nothing" in logged["compile_report"]
    *_, watched, scaled = callback.report.infer.diagnostics.passes
    assert (watched["name"], watched["changed"], watched["target"]) == ("Watch", False, "net")
    assert (scaled["name"], scaled["changed"], scaled["graph"]) == ("Scale", True, "inference")
    assert scaled["nodes_before"] == scaled["nodes_after"] == watched["nodes_after"] > 3
    assert watched["seconds"] > 0
    json.dumps(callback.report.to_dict())
    assert re.search(r"Watch: 0 of \d+ graphs changed\n +Scale: 1 of 1 graphs changed$", str(callback.report), re.M)
    trainer(callback).predict(module, loader(2))
    assert [watch.seen[-1][2:] for watch in watches] == [(True, True)] * len(watches)
    assert infer_only.seen == [("infer", "inference", True, True)] * 2


def test_a_pass_in_options_runs_and_a_string_is_refused():
    """Torch itself accepts a string there, and compiles nothing."""
    watch = Watch()
    config = InductorConfig(options={"post_grad_custom_post_pass": watch}, passes=[Scale(3)])
    callback = callback_with(train_mode=None, infer_mode=config, on_error="raise")
    trainer(callback).predict(Classifier(), loader(2))
    assert callback.report.infer.graphs == 1
    assert [flag for _, _, flag, _ in watch.seen] == [True]
    with pytest.raises(TypeError, match=r"options\['post_grad_custom_post_pass'\]='module:name' must be a graph pass"):
        InductorConfig(options={"post_grad_custom_post_pass": "module:name"})


@pytest.mark.parametrize("fails", [False, True])
def test_a_pass_that_the_user_set_in_torch_runs_before_ours_and_a_failure_names_it(fails):
    seen, ours = [], RecordGraphs(hook="post_grad_post")

    def mark(graph):
        seen.append(len(ours.graphs))
        assert not fails

    says = pytest.warns(CompileWarning, match="graph pass 'mark' at post_grad_post") if fails else nullcontext()
    with torch._inductor.config.patch(post_grad_custom_post_pass=mark), says:
        trainer(callback_with(ours, train_mode=None)).validate(Classifier(), loader(1), verbose=False)
    assert (seen, len(ours.graphs)) == ([0], 0 if fails else 1)


@pytest.mark.parametrize("hook", ["joint_pre", "post_grad_post"])
def test_equal_passes_hit_torchs_cache_and_another_argument_misses(hook, tmp_path):
    found, module = [], Classifier(nn.Sequential(nn.Linear(8, 3), nn.Tanh()))
    for factor in (1, 1, 2, 2):
        torch._dynamo.reset()
        logger = TensorBoardLogger(tmp_path)
        callback = callback_with(Scale(factor, hook), train_mode=None, cache_dir=tmp_path / "cache")
        trainer(callback, logger=logger, log_every_n_steps=1).validate(module, loader(1), verbose=False)
        (run,) = callback.report.infer.diagnostics.passes
        found.append((callback.report.infer.cache_hits, "changed" in run))
    assert found == [(0, True), (1, False), (0, True), (1, False)]
    assert run == {"target": "net", "name": "Scale", "hook": hook, "from_cache": True}
    assert re.search(r"graph passes +Scale: did not run, 1 from the cache$", str(callback.report), re.MULTILINE)
    assert "torch's cache has the graph" in texts(logger)["compile_report"]


def test_nodes_are_found_counted_inserted_and_replaced(compiled):
    @graph_pass
    def smooth(graph, is_inference):
        (relu,) = find_nodes(graph, aten.relu)
        assert find_nodes(graph, aten.relu.default, aten.tanh) == [relu]
        new = replace_node(relu, aten.sigmoid.default, relu.args[0])
        assert new.meta["val"].shape == (4, 16)
        before = call_before(new, aten.sum.dim_IntList, new.args[0], [1])
        assert before.meta["val"].shape == (4,)
        assert count_ops(graph)["aten.sigmoid.default"] == 1

    net = compiled(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), passes=[smooth], on_error="raise", verify="off")
    with torch.no_grad():
        result = net(torch.randn(4, 8))
    assert 0 < result.min() < result.max() < 1


# ------------------------------------------------------------------------------------------ failures


def removes_an_output(graph, is_inference):
    graph.output_node().args = ((),)


def changes_an_output(graph, is_inference):
    output = graph.output_node()
    (value,) = output.args[0]
    with graph.inserting_before(output):
        other = graph.call_function(aten.sum.default, (value,))
    other.meta["val"] = value.meta["val"].sum()
    output.args = ((other,),)


def uses_a_node_of_another_graph(graph, is_inference):
    first, *_ = [node for node in graph.nodes if node.op == "call_function"]
    first.args = (torch.fx.Graph().placeholder("stranger"), *first.args[1:])


WRONG = {
    removes_an_output: r"nothing in place of torch.float32\[4, 3\]",
    changes_an_output: r"float32\[\] in place of torch.float32\[4, 3\]",
    uses_a_node_of_another_graph: "RuntimeError: .*stranger",
}


@pytest.mark.parametrize("function", WRONG, ids=lambda f: f.__name__)
def test_a_graph_that_a_pass_makes_wrong_runs_eagerly(function):
    module = Classifier()
    expected = trainer().predict(module, loader(1))
    callback = callback_with(graph_pass(function), train_mode=None)
    text = f"graph pass '{function.__name__}' at post_grad_post in the infer phase .*{WRONG[function]}"
    with pytest.warns(CompileWarning, match=text):
        predicted = trainer(callback).predict(module, loader(1))
    torch.testing.assert_close(predicted, expected)
    infer = callback.report.infer
    assert (infer.diagnostics.skipped_passes, infer.fallbacks, infer.graphs) == (1, 1, 0)


# ------------------------------------------------------------------------------------------ identity


def test_a_uuid_covers_arguments_source_hook_captured_values_and_attributes_of_the_class(monkeypatch):
    def body(graph, is_inference):
        pass

    def captures(factor):
        def visit(node):
            return [node] * factor

        return graph_pass(lambda graph, is_inference: visit(graph))

    def passes():
        lambdas = [graph_pass(f) for f in (lambda graph, is_inference: graph.lint(), lambda graph, is_inference: None)]
        values = 2, 3, 2.0, (2,), [2], torch.float16, {"by": 2}
        functions = graph_pass(body), graph_pass(hook="post_grad_pre")(body), captures(2), captures(3), *lambdas
        return [*map(Scale, values), *functions]

    uuids = [each.uuid() for each in passes()]
    assert None not in uuids
    assert len(set(uuids)) == len(uuids)
    assert [each.uuid() for each in passes()] == uuids
    monkeypatch.setattr(Scale, "limit", 3, raising=False)
    assert Scale(2).uuid() not in (uuids[0], None)
    factors = [1, 2]
    changed, expected = Scale(factors), Scale([1, 2]).uuid()
    factors.append(3)  # by the caller
    assert changed.uuid() == expected == pickle.loads(pickle.dumps(changed)).uuid()


def test_a_uuid_is_none_if_the_source_does_not_describe_the_pass_and_configs_differ():
    class InFunction(Scale):
        pass

    created = type("Created", (Scale,), {"__call__": lambda self, graph, is_inference: None})
    namespace = {"__name__": "a_notebook", "GraphPass": GraphPass}
    exec("class InNotebook(GraphPass):\n    def __call__(self, graph, is_inference): pass", namespace)
    values = object(), Scale(object()), torch.ones(2)
    passes = [InFunction(2), created(2), namespace["InNotebook"](), *map(Scale, values)]
    assert [each.uuid() for each in passes] == [None] * len(passes)
    first, second = InFunction(2), InFunction(3)
    assert InductorConfig(passes=(first,)) == InductorConfig(passes=(first,)) != InductorConfig(passes=(second,))


USER_PASS = """
from compile_callbacks import GraphPass

def factor():
    return 10

class Mixin:
    def value(self):
        return factor()

class Scale(Mixin, GraphPass):
    def __call__(self, graph, is_inference):
        self.value()
"""


def test_a_uuid_changes_if_a_function_in_the_file_of_the_pass_was_edited(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    uuids = []
    for number, factor in enumerate((10, 10, 100)):
        (tmp_path / f"user_pass_{number}").mkdir()
        (tmp_path / f"user_pass_{number}" / "user_pass.py").write_text(USER_PASS.replace("10", str(factor)))
        monkeypatch.syspath_prepend(tmp_path / f"user_pass_{number}")
        sys.modules.pop("user_pass", None)
        uuids.append(importlib.import_module("user_pass").Scale().uuid())
    del sys.modules["user_pass"]
    assert uuids[0] == uuids[1] != uuids[2]
