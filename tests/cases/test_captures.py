"""Graphs that torch captures wrongly, values that are grossly wrong, and comparisons that fail within a transform."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import hessian, jacfwd, vmap

from compile_callbacks import CompileError, report_of
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.support.models import CLASSES, FEATURES
from tests.support.passes import Doubling, WrongRows

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

CAPTURES_WRONGLY = torch.__version__ < "2.13"
TRAIN = {"infer_mode": None}
DERIVATIVES = {
    "laplacian": lambda f, points: vmap(hessian(f))(points).diagonal(dim1=1, dim2=2).sum(1),
    "jacobian": lambda f, points: vmap(jacfwd(f))(points),
}
FUNCTIONS: dict[str, Any] = {how.replace(" ", "_"): functools.partial(zoo.function_that, how) for how in zoo.MULTIPLY}
FUNCTIONS |= {"dirty": lambda: zoo.MarksDirty(FEATURES, FEATURES)}
WRONG = "add_in_place", "dirty", "out", "relu_in_place"
WRONG_TRAIN, WRONG_INFER = (
    {f"{phase}.verified": "differs 1", f"{phase}.fallbacks": 1, f"{phase}.diagnostics.eager_calls": {"net": calls}}
    for phase, calls in (("train", 6), ("infer", 4))
)
NEGATED = WrongRows("backward", factor=-1)  # gradients, whose norms stay the same
WARN, SAID = {"verify": "warn", "targets": ["net"]}, "the graph runs eagerly from here on, because rounding errors"


def relu():
    return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.ReLU())


CASES = [
    Case(name="autograd functions", callback=TRAIN, codes=("CC307",) * 4 * CAPTURES_WRONGLY,
         make=zoo.logits(lambda m, x: sum(getattr(m, name)(x) for name in FUNCTIONS), **FUNCTIONS),
         expect={"train.graphs": 2, "train.fallbacks": 4, "train.diagnostics.eager_calls": dict.fromkeys(WRONG, 6)}
         if CAPTURES_WRONGLY else {"train.graphs": 7, "train.graph_breaks": 2},  # newer torch breaks that of "dirty"
         says="computes wrong gradients if it captures a torch.autograd.Function" * CAPTURES_WRONGLY),
    Case(name="wrong outputs", make=net(relu), callback={**WARN, "passes": [Doubling(torch.ops.aten.relu.default)]},
         expect=WRONG_TRAIN | WRONG_INFER, codes=("CC302",) * 2, says=SAID),
    Case(name="wrong gradients", make=net(relu), callback={**WARN, "passes": [NEGATED]}, expect=WRONG_TRAIN,
         codes=("CC302",), says=SAID),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_wrong_captures_and_values_do_not_reach_the_run(case):
    check(case)


@pytest.mark.filterwarnings("ignore:target 'forward' runs eagerly")  # the Hessian on torch 2.11
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_within_a_target_are_compared_and_leave_no_transform_active(derivative, compiled):
    net, points = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 2)
    eager = zoo.Calls(net, lambda net, points: derivative(lambda point: net(point)[0], points))
    module = compiled(copy.deepcopy(eager))
    torch.testing.assert_close(module(points), eager(points))
    module(points).square().sum().backward()
    train = report_of(module).train
    assert train.verified == "equal 1" or train.fallbacks == 1
    assert torch._C._functorch.peek_interpreter_stack() is None


RUNS = []


def is_busy_once(x):
    RUNS.append("run")
    if len(RUNS) == 1:
        raise RuntimeError("busy")
    return x


kernel = zoo.custom_operator("is_busy_once", is_busy_once)


def busy(net, x):
    with torch.autocast("cpu"), torch.enable_grad():
        return kernel(net(x)) * 2


@torch.no_grad()
@pytest.mark.parametrize("verify", ["raise", "warn"])
def test_verify_raise_raises_if_a_comparison_fails_with_an_error(verify, compiled):
    RUNS.clear()
    module = compiled(zoo.Calls(nn.Identity(), busy), verify=verify)
    message = "could not be compared with eager in the infer phase: error: RuntimeError: busy"
    with pytest.raises(CompileError, match=message) if verify == "raise" else contextlib.nullcontext():
        module(torch.randn(4))
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_grad_enabled()
    assert report_of(module).infer.verified == "not compared 1 (error)"
