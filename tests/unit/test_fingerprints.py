"""Fingerprints: equal for equal modules in every process, bounded, and never an exception."""

from __future__ import annotations

import functools
import types
import unittest.mock

import pytest
import torch
from torch import nn

from compile_callbacks._utils import fingerprints
from compile_callbacks._utils.fingerprints import (
    architecture_fingerprint,
    code_fingerprint,
    device_fingerprint,
    digest,
    installed_version,
)
from tests.support.processes import run_in_new_process

PRINT_FINGERPRINTS = """
from torch import nn
from compile_callbacks._utils.fingerprints import architecture_fingerprint, code_fingerprint

class Net(nn.Module):
    def forward(self, x):
        return x if self.kind in {"linear", "conv", "norm", "none"} else (lambda y: y + object.__hash__(1))(x)

    def extra_repr(self):
        return f"kind={object()}"

print(code_fingerprint(Net()), architecture_fingerprint(Net()))
"""


def doubled(function):
    @functools.wraps(function)
    def call(*args):
        return 2 * function(*args)

    return call


def net(forward=lambda self, x: x, **members):
    return type("Net", (nn.Module,), {"forward": forward, "__module__": __name__, **members})()


def raises(self):
    raise RuntimeError("the user's extra_repr")


# ------------------------------------------------------------------------------------------ data, versions, devices


def test_digest_ignores_the_order_of_keys_and_nothing_else():
    assert digest({"a": [1, 2], "b": None}) == digest({"b": None, "a": [1, 2]})
    assert len({digest(data) for data in ({"a": [1, 2]}, {"a": [2, 1]}, {"a": 1.0}, {"a": "1"}, {}, None)}) == 6


def test_installed_version_is_none_for_a_missing_package():
    assert installed_version("no-such-package") is None
    assert torch.__version__.startswith(str(installed_version("torch")).partition("+")[0])


def test_device_fingerprint_depends_on_instructions_and_threads(monkeypatch):
    before = device_fingerprint(torch.device("cpu"))
    assert device_fingerprint(torch.device("cpu")) == before != device_fingerprint(torch.device("meta"))
    for key, name, value in (
        (torch, "get_num_threads", lambda: 99),
        (torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
        (fingerprints, "cpu_info", lambda *fields: "another CPU"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(key, name, value)
            assert device_fingerprint(torch.device("cpu")) != before


# ------------------------------------------------------------------------------------------ architecture


def test_architecture_fingerprint_depends_on_structure_and_not_on_values():
    def fingerprint(*layers):
        return architecture_fingerprint(nn.Sequential(*layers))

    assert fingerprint(nn.Linear(2, 3)) == fingerprint(nn.Linear(2, 3))
    shared = nn.Linear(2, 2)
    unlike = [
        fingerprint(nn.Linear(2, 3)),
        fingerprint(nn.Linear(3, 2)),
        fingerprint(nn.Linear(2, 3, bias=False)),
        fingerprint(nn.Linear(2, 3).double()),
        fingerprint(nn.Linear(2, 3), nn.ReLU()),
        fingerprint(nn.Dropout(0.1)),
        fingerprint(nn.Dropout(0.2)),
        fingerprint(shared),
        fingerprint(shared, shared),
        fingerprint(shared, nn.Linear(2, 2)),
    ]
    assert len(set(unlike)) == len(unlike)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(3),
        lambda: net(extra_repr=raises),
        lambda: net(extra_repr=lambda self: None),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.ParameterList([torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])]),
    ],
    ids=["lazy", "extra_repr raises", "extra_repr returns None", "scripted", "nested tensor"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The PyTorch API of nested tensors")
def test_architecture_fingerprint_leaves_out_what_cannot_be_described(make):
    assert architecture_fingerprint(nn.Sequential(make())) == architecture_fingerprint(nn.Sequential(make()))


def test_architecture_fingerprint_ends_if_modules_contain_each_other():
    def make():
        parent, child = nn.Module(), nn.Module()
        parent.child, child.parent = child, parent
        return parent

    assert architecture_fingerprint(make()) == architecture_fingerprint(make())


# ------------------------------------------------------------------------------------------ code


def test_code_fingerprint_depends_on_what_methods_do():
    key = code_fingerprint(net(lambda self, x: x.sin()))
    assert code_fingerprint(net(lambda self, x: x.sin())) == key  # on another line
    assert code_fingerprint(net(lambda self, x: x.cos())) != key
    assert code_fingerprint(net(lambda self, x: x.sin() * 2)) != key
    assert code_fingerprint(nn.Sequential(net(lambda self, x: x.sin()))) == key


@pytest.mark.parametrize("wrap", [doubled, staticmethod, classmethod, property, functools.cached_property])
def test_code_fingerprint_depends_on_wrapped_functions(wrap):
    def with_member(function):
        return net(member=wrap(function))

    assert code_fingerprint(with_member(lambda self: 1)) == code_fingerprint(with_member(lambda self: 1))
    assert code_fingerprint(with_member(lambda self: 1)) != code_fingerprint(with_member(lambda self: 2))


def test_code_fingerprint_leaves_out_classes_of_torch():
    assert code_fingerprint(nn.Linear(2, 2)) == code_fingerprint(nn.Sequential(nn.Conv2d(1, 1, 1)))


class EveryAttribute:
    """Has every attribute, as a mock has; each is another such object."""

    def __getattr__(self, name):
        return EveryAttribute()


class RaisingDict:
    @property
    def __dict__(self):
        raise RuntimeError("the user's class")


def wraps_itself():
    def function(self):
        return 1

    function.__wrapped__ = function
    return function


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "member",
    [
        unittest.mock.MagicMock(),
        unittest.mock.MagicMock(spec=types.FunctionType),
        unittest.mock.create_autospec(lambda self: 1),
        property(unittest.mock.MagicMock()),
        EveryAttribute(),
        RaisingDict(),
        wraps_itself(),
        EveryAttribute,
    ],
    ids=["mock", "mock of a function", "autospec", "property", "any attribute", "raising", "ring", "class"],
)
def test_code_fingerprint_is_bounded_for_any_class_attribute(member):
    def with_member():
        return net(lambda self, x: x.sin(), member=member)

    assert code_fingerprint(with_member()) == code_fingerprint(with_member())
    assert code_fingerprint(with_member()) != code_fingerprint(net(lambda self, x: x.cos(), member=member))


def test_fingerprints_are_equal_in_every_process(capsys):
    exec(PRINT_FINGERPRINTS, {"__name__": "__main__"})
    assert run_in_new_process(PRINT_FINGERPRINTS) == capsys.readouterr().out  # there with another hash seed
