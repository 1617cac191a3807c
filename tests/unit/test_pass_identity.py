"""The identity of a graph pass in torch's compile cache: its code, its arguments, its hook point and the phase."""

from __future__ import annotations

import pickle

import pytest
import torch

from compile_callbacks import GraphPass, InductorConfig, graph_pass
from tests.support.processes import run_in_new_process

pytestmark = pytest.mark.all_versions


class Scale(GraphPass):
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], self.factor)


def test_a_uuid_covers_arguments_source_and_hook():
    def body(graph, is_inference):
        pass

    lambdas = [graph_pass(f) for f in (lambda graph, is_inference: graph.lint(), lambda graph, is_inference: None)]
    passes = [Scale(2), Scale(3), Scale(2.0), graph_pass(body), graph_pass(hook="post_grad_pre")(body), *lambdas]
    passes += [Scale(x) for x in (torch.ones(3), torch.zeros(3), torch.ones(3, 1), torch.tensor(1.0))]
    uuids = [each.uuid() for each in passes]
    assert None not in uuids
    assert len(set(uuids)) == len(passes)
    assert Scale(2).uuid() == Scale(2).uuid()
    assert graph_pass(body).uuid() == graph_pass(body).uuid()
    assert Scale(torch.ones(3)).uuid() == Scale(torch.ones(3)).uuid()
    assert Scale(torch.ones(2**20)).uuid() is None


def test_a_uuid_covers_the_values_that_a_function_captures():
    def make(factor):
        def visit(node):
            return [node] * factor

        return graph_pass(lambda graph, is_inference: visit(graph))

    assert make(2).uuid() is not None
    assert make(2).uuid() == make(2).uuid() != make(3).uuid()


def test_a_uuid_covers_attributes_of_the_class(monkeypatch):
    before = Scale(2).uuid()
    monkeypatch.setattr(Scale, "limit", 3, raising=False)
    assert Scale(2).uuid() not in (before, None)


def test_a_uuid_does_not_change_with_an_argument_that_the_caller_changes_later():
    factors = [1, 2]
    changed = Scale(factors)
    expected = Scale([1, 2]).uuid()
    factors.append(3)
    assert changed.uuid() == expected == pickle.loads(pickle.dumps(changed)).uuid()


def test_a_uuid_is_none_if_the_source_does_not_describe_the_pass():
    class InFunction(Scale):
        pass

    created = type("Created", (Scale,), {"__call__": lambda self, graph, is_inference: None})
    namespace = {"__name__": "a_notebook", "GraphPass": GraphPass}
    exec("class InNotebook(GraphPass):\n    def __call__(self, graph, is_inference): pass", namespace)
    passes = [InFunction(2), created(2), namespace["InNotebook"](), Scale(object()), Scale(Scale(object()))]
    assert [each.uuid() for each in passes] == [None] * len(passes)


def test_configs_with_passes_that_have_no_uuid_differ():
    class Local(Scale):
        pass

    first, second = Local(2), Local(3)
    assert first.uuid() is second.uuid() is None
    assert InductorConfig(passes=(first,)) == InductorConfig(passes=(first,)) != InductorConfig(passes=(second,))


COMPILE = """
import sys
import torch

sys.path.insert(0, sys.argv[1])
from user_pass import Scale

options = {"post_grad_custom_post_pass": Scale(), "fallback_by_default": True}  # compiles no C++
compiled = torch.compile(lambda x: x * 2, options=options)
print(compiled(torch.ones(1)).item())
"""
USER_PASS = """
import torch
from compile_callbacks import GraphPass

def factor():
    return 10

class Mixin:
    def value(self):
        return factor()

class Scale(Mixin, GraphPass):
    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], self.value())
"""


@pytest.mark.slow
def test_a_graph_is_compiled_again_in_the_next_process_after_the_file_of_its_pass_was_edited(tmp_path):
    printed = []
    for factor in (10, 100):
        (tmp_path / "user_pass.py").write_text(USER_PASS.replace("return 10", f"return {factor}"))
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        printed.append(float(run_in_new_process(COMPILE, tmp_path, environment=environment).split()[-1]))
    assert printed == [10, 100]
