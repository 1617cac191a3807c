"""Backward passes that keep their graph and gradients that are differentiated."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from compile_callbacks import compile_phases, report_of, restore
from tests.cases import zoo
from tests.cases.case import Case, check
from tests.support.models import FEATURES, Classifier, mlp, seeded

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

LEFT_EAGER = "^target 'net' runs eagerly in the train phase, because the eager steps differentiate its gradients"
DOUBLE: dict[str, Any] = {"train": (4,) * 6, "validation": None, "predict": None, "trainer": {"precision": "64-true"}}
DOUBLE |= {"close": {"rtol": 1e-8, "atol": 1e-8}}
TRAIN = {"infer_mode": None, "targets": ["net"], "verify": "raise"}


def keeps(name, make, **settings):
    """A case in which the graph is kept, so that each backward pass must give the same gradients, without a warning."""
    callback, expect = TRAIN | settings.pop("callback", {}), settings.pop("expect", {})
    return Case(name=name, make=make, callback=callback, expect=expect, **DOUBLE | settings)


def manual(make, first=2):
    return lambda: zoo.Repeated(zoo.kept, make(), manual=True, first=first)


def backward_twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


class BackwardTwice(Classifier):
    def backward(self, loss):
        backward_twice(loss)


def backward_of_instance():
    module = Classifier(zoo.normalized())
    module.backward = backward_twice
    return module


BROKEN = {"train.graphs": 2, "train.graph_breaks": 1}
NETS = {"smooth": (zoo.normalized, {}), "graph break": (zoo.breaking, BROKEN), "mlp": (mlp, {})}
ON_GPU = {"trainer": {"accelerator": "cuda"}, "close": {"rtol": 5e-3, "atol": 5e-3}, "train": (4,) * 12}
KEPT = [
    *(keeps(name, manual(make), expect=expect) for name, (make, expect) in NETS.items()),
    keeps("blocks", manual(zoo.blocks), callback={"targets": ["net.*"]}),
    # The eager steps show that the graph is kept.
    keeps("baseline", lambda: zoo.Repeated(zoo.kept, zoo.normalized()), callback={"baseline_steps": 2}),
    keeps("twice", lambda: BackwardTwice(zoo.normalized())),
    keeps("twice by an instance", backward_of_instance),
    *(
        pytest.param(keeps(f"gpu {name} {mode}", manual(make, first), callback={"train_mode": mode}, expect=expect,
                           **ON_GPU), marks=pytest.mark.gpu)
        for name, (make, expect) in NETS.items()
        # torch's CUDA graphs end the run if only some steps keep the graph (page on limits).
        for mode, first in (("default", 2), ("reduce-overhead", 0))
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_gradients_of_repeated_backward_passes(case):
    check(case)


@pytest.mark.parametrize("loss_of", [zoo.critic, zoo.meta])
def test_target_whose_gradients_are_differentiated_stays_eager_also_in_a_later_run(loss_of, tmp_path):
    make = lambda: zoo.Repeated(loss_of, nn.Sequential(zoo.normalized(), nn.Dropout(0.5)))  # noqa: E731
    expect = {"train.graphs": 0, "train.fallbacks": 1, "train.verdict": "not compiled"}
    expect["train.diagnostics.eager_calls"] = ...
    case = keeps("differentiated", make, train=(4,) * 12, expect=expect, codes=("CC303",), says=LEFT_EAGER)
    for baseline_steps, suppress_errors in ((2, False), (0, False), (2, True)):  # the user's setting of torch
        settings = {**case.callback, "baseline_steps": baseline_steps, "cache_dir": tmp_path}
        inside = functools.partial(torch._dynamo.config.patch, suppress_errors=suppress_errors)
        callback = check(dataclasses.replace(case, callback=settings, inside=inside))
        assert "explain CC303" in str(callback.report)


def test_hand_written_loop_may_keep_the_graph(tmp_path):
    x = torch.randn(4, FEATURES, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(seeded(zoo.normalized).double()(x).square().sum(), x) * 3
    for hits in (0, 1):  # the second time, the code is from torch's cache
        torch._dynamo.reset()
        net = seeded(zoo.normalized).double()
        compile_phases(net, verify="off", cache_dir=tmp_path)
        values = torch.autograd.grad(net(x).square().sum(), x)
        out = net(x)
        values += torch.autograd.grad(out.square().sum(), x, retain_graph=True)
        values += torch.autograd.grad(out.square().sum(), x)
        torch.testing.assert_close(values, expected, rtol=1e-8, atol=1e-8)
        assert report_of(net).train.cache_hits == hits
        restore(net)


def test_backward_pass_frees_the_inputs_of_its_call(compiled):
    net, x = compiled(zoo.normalized(), verify="off"), torch.randn(4, FEATURES, requires_grad=True)
    doubled = x * 2
    out, reference = net(doubled), weakref.ref(doubled)
    del doubled
    out.sum().backward()
    assert reference() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out.sum(), x, retain_graph=True)
