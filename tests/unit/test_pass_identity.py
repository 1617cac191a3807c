"""The identity of a graph pass in torch's compile cache: its code, its arguments, its hook point and the phase."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from compile_callbacks import GraphPass, graph_pass
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


USER_MODULE = """
import functools
import logging
import re

import torch
from compile_callbacks import GraphPass

FACTOR = 10
TABLE = {torch.ops.aten.mul.Tensor: 2}
logger = logging.getLogger(__name__)

class Mixin:
    pattern = re.compile("mul")

    @property
    def factor(self):
        return 10

def by_function():
    return 20

@functools.cache
def by_cached_function():
    return 30

@torch.no_grad()
def by_decorated_function():
    return 40

class Helper:
    factor = 50

class Scale(Mixin, GraphPass):
    def __call__(self, graph, is_inference):
        logger.info("runs")
        factors = [x for x in (self.factor, by_function(), by_cached_function(), Helper.factor, below(), FACTOR)]
        print(factors, by_decorated_function(), TABLE, [later for later in (below,)])

def below():
    print("recursive")
    return below
"""


def uuid_of(source: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the uuid of ``Scale()`` in a module with this source."""
    module = types.ModuleType("user_module")
    monkeypatch.setitem(sys.modules, "user_module", module)
    exec(compile(source, "user_module.py", "exec"), vars(module))
    identity: str | None = module.Scale().uuid()
    return identity


def test_a_uuid_covers_mixins_and_what_the_pass_calls_in_its_module(monkeypatch):
    changes = [
        ("return 10", "return 11"),
        ("return 20", "return 21"),
        ("return 30", "return 31"),
        ("return 40", "return 41"),
        ("factor = 50", "factor = 51"),
        ('re.compile("mul")', 're.compile("add")'),
        ('print("recursive")', 'print("changed")'),
        ("FACTOR = 10", "FACTOR = 11"),
        ("aten.mul.Tensor: 2", "aten.mul.Tensor: 3"),
        ("[later for", "[(later, 1) for"),
    ]
    sources = [USER_MODULE, *(USER_MODULE.replace(*change) for change in changes)]
    uuids = [uuid_of(source, monkeypatch) for source in sources]
    assert None not in uuids
    assert len(set(uuids)) == len(set(sources)) == len(changes) + 1
    assert uuid_of(USER_MODULE, monkeypatch) == uuids[0]


@pytest.mark.parametrize(
    "change",
    [("FACTOR = 10", "FACTOR = object()"), ("factor = 50", "factor = object()"), ("return below", "return missing")],
)
def test_a_uuid_is_none_if_the_module_contains_what_cannot_be_described(monkeypatch, change):
    assert uuid_of(USER_MODULE.replace(*change), monkeypatch) is None


def test_a_recursive_nested_function_has_a_uuid():
    def make(factor):
        def visit(node):
            return [visit(other) for other in node.users] * factor

        @graph_pass
        def recursive(graph, is_inference):
            visit(next(iter(graph.nodes)))
            print(recursive.name)

        return recursive

    assert make(2).uuid() is not None
    assert make(2).uuid() == make(2).uuid() != make(3).uuid()


def test_a_uuid_is_none_while_a_closure_cell_is_empty():
    def make():
        def nested(graph, is_inference):
            print(later)

        early = graph_pass(nested)
        uuids = [early.uuid()]
        later = 2
        return [*uuids, early.uuid(), graph_pass(nested).uuid()]

    first, second, complete = make()
    assert first is None
    assert second is None  # a uuid is computed once
    assert complete is not None


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

class Mixin:
    factor = 10

    def value(self):
        return self.factor

class Scale(Mixin, GraphPass):
    def __call__(self, graph, is_inference):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], self.value())
"""


@pytest.mark.slow
def test_a_graph_is_compiled_again_in_the_next_process_after_its_mixin_was_edited(tmp_path):
    printed = []
    for factor in (10, 100):
        (tmp_path / "user_pass.py").write_text(USER_PASS.replace("factor = 10", f"factor = {factor}"))
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        printed.append(float(run_in_new_process(COMPILE, tmp_path, environment=environment).split()[-1]))
    assert printed == [10, 100]
