"""Compiling and comparing leave the user's code alone: calls, hooks, aliased inputs, checkpoints and transforms."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import report_of
from tests.cases import zoo
from tests.cases.case import UNSURPRISING, Case, check
from tests.support.models import FEATURES, Wrapper
from tests.support.passes import WrongForward

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.usefixtures("no_codegen", "recompiles_at_once"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:Warning"),  # from torch's own jvp
]


def attends(net, x):
    x = x.unsqueeze(1) * torch.ones(5, 1)
    return net(x, x, x)[0].mean(1)[:, :3]


def reads_tokens(net, x):
    tokens = (x.abs() * 4).long() % 10
    return net[0](tokens[:, :-1]).mean(1)[:, :3] * net[1](tokens)


def tokens():
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10)
    return nn.ModuleList([embedding, zoo.Calls(nn.ModuleList([nn.Embedding(10, 8), head]), zoo.language_model)])


def counts_calls():
    """Count calls in Python, in a hook, and in a batch norm."""
    net = zoo.Counting(Wrapper.forward)
    net.net.register_forward_hook(lambda *_: net.sizes.append(0))
    return net


def case(name, module, run=lambda net, x: net(x), **fields):
    """A case whose steps call a module with a function."""
    fields = {"validation": None, "predict": None} | fields
    callback = {"targets": ["net"], "verify": "raise", "infer_mode": None} | fields.pop("callback", {})
    return Case(name=name, make=lambda: zoo.CallsInTraining(module(), run), callback=callback, **fields)


def wrong(name, module, *sizes, **expect):
    """A graph that differs from eager must not change what a checkpoint computes again."""
    callback = {"passes": [WrongForward("train", *sizes)], "verify": "eager", "train_mode": {"dynamic": False}}
    expect = dict.fromkeys([*UNSURPRISING, "train.verified"], ...) | {"train.fallbacks": 1} | expect
    fields = {"callback": callback, "expect": expect, "train": (8, 8, 8)}
    said = {"codes": ("CC302",), "says": "it runs eagerly from here on", "text": r"^(?s:(?!.*CC301).*CC302)"}
    return case(name, module, zoo.in_checkpoints, **fields, **said)


def transformed(transform, **expect):
    said = {"codes": ("CC108",), "says": "^target 'net' runs eagerly in the train phase"}
    fields = {"callback": {"on_error": "raise"}, "expect": {"train.diagnostics.eager_calls": ...} | expect}
    return case(transform.__name__, lambda: zoo.around(nn.Tanh()), transform, **fields, **said)


CASES = [
    case("one input three times", lambda: nn.MultiheadAttention(FEATURES, 2, batch_first=True), attends),
    case("a view of a batch, and one tensor under two names", tokens, reads_tokens,
         callback={"targets": ["net.0", "net.1"]}, expect={"train.graphs": 2}),
    case("calls", counts_calls, train=(4, 5, 6), expect={"train.graphs": 3, "train.recompiles": 2}),
    wrong("checkpoint, wrong in a later call", lambda: zoo.around(nn.ReLU()), 5),
    wrong("checkpoint, wrong behind a graph break", zoo.breaking, **{"train.fallbacks": 2}),
    # Calls that are not transformed are compiled.
    transformed(zoo.per_sample_gradients),
    transformed(zoo.vmapped, **{"train.graphs": 0}),
    transformed(zoo.directional, **{"train.graphs": 0}),
]  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=str)
def test_the_run_equals_eager(row):
    check(row)


def test_hooks_that_come_after_the_first_compile_run(compiled):
    module, x = compiled(zoo.around(nn.ReLU()), infer_mode=None), torch.ones(3, FEATURES)
    before = module(x)
    handle = module[2].register_forward_hook(lambda layer, args, output: output + 1)
    torch.testing.assert_close(module(x), before + 1)
    handle.remove()
    torch.testing.assert_close(module(x), before)


def test_hooks_on_tensors_see_one_backward_pass(compiled):
    module, seen = compiled(zoo.around(nn.ReLU()), verify="raise"), []
    x = torch.randn(3, FEATURES, requires_grad=True)
    x.register_hook(lambda gradient: seen.append("input"))
    module[0].weight.register_hook(lambda gradient: seen.append("weight"))
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append("accumulated"))
    output = module(x)
    assert (seen, x.grad, module[0].weight.grad) == ([], None, None)
    output.sum().backward()
    assert sorted(seen) == ["accumulated", "input", "weight"]
    assert report_of(module).train.verified == "equal 1"
