"""The identity of a graph pass in torch's compile cache: its code, its arguments, its hook point and the phase."""

from __future__ import annotations

import importlib
import os
import sys
import time
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


# ------------------------------------------------------------------------------------------ arguments


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


# ------------------------------------------------------------------------------------------ code

USER_MODULE = """
from compile_callbacks import GraphPass
from user_package import helpers

class Mixin:
    @property
    def factor(self):
        return 10

class Scale(Mixin, GraphPass):
    def __call__(self, graph, is_inference):
        print(self.factor, helpers.by_function())

class ScaleMore(Scale):
    pass
"""
HELPERS = "def by_function():\n    return 20\n"


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    """Return a function that writes and imports a package of the user's."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(source: str = USER_MODULE, helpers: str = HELPERS, edited: float = 0.0) -> types.ModuleType:
        for name, text in {"__init__": "", "helpers": helpers, "passes": source}.items():
            file = tmp_path / "user_package" / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            os.utime(file, (edited, edited))
        for name in [name for name in sys.modules if name.partition(".")[0] == "user_package"]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("user_package.passes")

    return write


def test_a_uuid_covers_the_module_of_the_pass_and_the_modules_that_it_imports(user_package):
    changed = {"source": USER_MODULE.replace("return 10", "return 11")}, {"helpers": HELPERS.replace("20", "21")}
    uuids = [user_package(**changes).Scale().uuid() for changes in ({}, *changed)]
    assert None not in uuids
    assert len(set(uuids)) == 3
    assert user_package().Scale().uuid() == uuids[0] != user_package().ScaleMore().uuid()


def test_a_uuid_is_none_if_a_file_was_edited_after_the_process_started(user_package):
    assert user_package(edited=time.time() + 60).Scale().uuid() is None


def test_a_uuid_is_none_without_a_source_file(monkeypatch):
    module = types.ModuleType("user_module")
    monkeypatch.setitem(sys.modules, "user_module", module)
    exec(USER_MODULE.replace("from user_package import helpers", ""), vars(module))
    assert module.Scale().uuid() is None


def test_a_uuid_of_a_nested_function_covers_the_values_around_it():
    def make(factor):
        @graph_pass
        def scale(graph, is_inference):
            print(factor)

        return scale

    assert make(2).uuid() is not None
    assert make(2).uuid() == make(2).uuid() != make(3).uuid()


def test_a_uuid_of_a_class_within_a_function_is_none():
    class Local(GraphPass):
        def __call__(self, graph, is_inference):
            pass

    assert Local().uuid() is None


def test_a_uuid_is_none_while_a_closure_cell_is_empty():
    def make():
        def nested(graph, is_inference):
            print(later)

        early = graph_pass(nested).uuid()
        later = 2
        return early, graph_pass(nested).uuid()

    early, complete = make()
    assert early is None
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
