"""Fingerprints are equal for equal modules in every process, end in bounded time, and never raise."""

from __future__ import annotations

import importlib.util
import unittest.mock

import pytest
import torch
from torch import nn

from compile_callbacks._utils.fingerprints import architecture_fingerprint, code_fingerprint
from tests.support.processes import run_in_new_process

PRINT_FINGERPRINTS = """
from tests.support.models import Classifier
from compile_callbacks._utils.fingerprints import architecture_fingerprint, code_fingerprint

class Net(Classifier):
    def extra_repr(self):
        return f"kind={object()}"

print(code_fingerprint(Net()), architecture_fingerprint(Net()))
"""


def net_with(**members):
    return type("Net", (nn.Module,), members)()


def test_architecture_fingerprint_depends_on_structure_and_not_on_values():
    linear, shared = nn.Linear(2, 3), nn.Linear(2, 2)
    single = [linear, nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).double()]
    single += [nn.Dropout(0.1), nn.Dropout(0.2), shared]
    several = [(linear, nn.ReLU()), (shared, shared), (shared, nn.Linear(2, 2))]
    unlike = {architecture_fingerprint(nn.Sequential(*layers)) for layers in [*((one,) for one in single), *several]}
    assert len(unlike) == len(single) + len(several)
    assert architecture_fingerprint(nn.Sequential(nn.Linear(2, 3))) == architecture_fingerprint(nn.Sequential(linear))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The PyTorch API of nested tensors")
def test_architecture_fingerprint_leaves_out_parts_that_it_cannot_describe():
    for make in (
        lambda: nn.LazyLinear(3),
        lambda: net_with(extra_repr=lambda self: 1 / 0),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.ParameterList([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]),
    ):
        assert architecture_fingerprint(nn.Sequential(make())) == architecture_fingerprint(nn.Sequential(make()))


def test_code_fingerprint_depends_on_the_source_of_the_users_classes(tmp_path):
    def fingerprint(name, forward):
        path = tmp_path / f"{name}.py"
        bases = "from torch import nn\n\nclass Mixin:\n    pass\n\n"
        path.write_text(f"{bases}class Net(Mixin, nn.Module):\n    def forward(self, x):\n        return {forward}\n")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        with unittest.mock.patch.dict("sys.modules", {name: module}):
            spec.loader.exec_module(module)
            return code_fingerprint(nn.Sequential(module.Net()))

    assert fingerprint("one", "x.sin()") == fingerprint("two", "x.sin()")
    assert fingerprint("one", "x.sin()") != fingerprint("three", "x.cos()")
    assert code_fingerprint(nn.Linear(2, 2)) == code_fingerprint(nn.Sequential(nn.Conv2d(1, 1, 1)))


@pytest.mark.timeout(30)
def test_code_fingerprint_ends_for_any_class_attribute():
    for member in (unittest.mock.MagicMock(), unittest.mock.create_autospec(lambda self: 1)):
        assert code_fingerprint(net_with(member=member)) == code_fingerprint(net_with(member=member))


@pytest.mark.slow
def test_fingerprints_are_equal_in_every_process():
    first, second = (run_in_new_process(PRINT_FINGERPRINTS, environment={"PYTHONHASHSEED": seed}) for seed in "12")
    assert first == second
