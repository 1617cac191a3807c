"""What a model is known by in what is kept of it."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
from torch import nn

from compile_callbacks.architecture import code_key

pytestmark = pytest.mark.newest

PRINT_KEY = """
from torch import nn
from compile_callbacks.architecture import code_key

class Net(nn.Module):
    def forward(self, x):
        return x if self.kind in {"linear", "conv", "norm", "none"} else (lambda y: y + object.__hash__(1))(x)

print(code_key(Net()))
"""


def doubled(function):
    @functools.wraps(function)
    def call(*args):
        return 2 * function(*args)

    return call


def net(forward, **members):
    return type("Net", (nn.Module,), {"forward": forward, "__module__": __name__, **members})()


def test_code_is_known_by_what_it_does():
    key = code_key(net(lambda self, x: x.sin()))
    assert code_key(net(lambda self, x: x.sin())) == key  # a line below
    assert code_key(net(lambda self, x: x.cos())) != key
    assert code_key(net(lambda self, x: x.sin() * 2)) != key
    assert code_key(nn.Sequential(net(lambda self, x: x.cos()))) == code_key(net(lambda self, x: x.cos()))


@pytest.mark.parametrize("wrap", [doubled, staticmethod, classmethod, property, functools.cached_property])
def test_wrapped_code_is_known(wrap):
    def member(of):
        return net(lambda self, x: x, member=wrap(of))

    assert code_key(member(lambda self: 1)) == code_key(member(lambda self: 1))
    assert code_key(member(lambda self: 1)) != code_key(member(lambda self: 2))


def test_code_has_the_same_key_in_every_process():
    run = functools.partial(
        subprocess.run, [sys.executable, "-c", PRINT_KEY], capture_output=True, text=True, check=True
    )
    assert len({run(env={"PYTHONHASHSEED": str(seed)}).stdout for seed in (1, 2, 3)}) == 1


def test_what_torch_is_made_of_does_not_count():
    assert code_key(nn.Linear(2, 2)) == code_key(nn.Sequential(nn.Conv2d(1, 1, 1)))
