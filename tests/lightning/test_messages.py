"""A message names the cause and the code that the report also names, and its advice helps."""

from __future__ import annotations

import contextlib
import functools
import logging
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import compile_callbacks
from compile_callbacks import CompileError, InductorCompile
from tests.cases.case import UNSURPRISING, Case, check, net, run
from tests.cases.zoo import Calls, CallsInTraining, Repeated, Scaled, critic, normalized
from tests.support.models import Classifier, mlp

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.usefixtures("no_codegen", "dropped_backends_go", "recompiles_at_once"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]

LOGGER = logging.getLogger(__name__)
DISABLED = functools.partial(torch._dynamo.config.patch, disable=True)
LIMIT = functools.partial(torch._dynamo.config.patch, recompile_limit=3)


def counts_flops(net, x):
    with FlopCounterMode(display=False):
        return net(x)


class CountsFlopsInHook(Classifier):
    """Calls a target in a hook only."""

    def __init__(self):
        super().__init__()
        self.other = mlp()

    def on_train_batch_start(self, batch, batch_idx):
        counts_flops(self.other, batch[0])


def with_backward_hook():
    module = Classifier()
    module.net[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    return module


def penalized(net, x):
    return net(x) * torch.func.grad(lambda x: net(x).sum())(x).square().mean()


def tagged(net, x):
    """Break the graph, and behind the break let the graphs depend on a string."""
    x = x * 2
    torch._dynamo.graph_break()
    return net(x) * len(net.tag)


class TagsInValidation(Classifier):
    def validation_step(self, batch, batch_idx):
        self.net.net.tag = f"v{batch_idx}"
        super().validation_step(batch, batch_idx)

    def on_train_epoch_start(self):
        self.net.net.tag = "t"


def scaled(net, x):
    """Multiply by a number that is computed from a tensor, and then break the graph again."""
    y = net(x) * x.abs().mean().item()
    LOGGER.debug("a second break")
    return y


def case(
    name, make, says="", *, text="", codes=(), expect=None, train=8, data=None, trainer=None, inside=None, **settings
):
    """A case that only trains, unless it has other data, and whose target is ``net``."""
    phases = {"validation": data, "predict": None, "trainer": trainer or {}, "inside": inside or contextlib.nullcontext}
    callback = {"targets": ["net"], "verify": "off", **({} if data else {"infer_mode": None}), **settings}
    expect = dict.fromkeys(UNSURPRISING, ...) | expect if expect else {}
    said = {"codes": codes or (says[:5],) * bool(says), "says": says[6:], "text": text}
    return Case(name=name, make=make, expect=expect, train=(4,) * train, callback=callback, **phases, **said)


def uncompiled(name, make, reason):
    """A phase without compiled steps has one reason everywhere, and no other message."""
    text = f"(?s)not compiled: .*{reason}.*see CC101.*read why train is not compiled: compile-callbacks explain CC101"
    return case(name, make, f"CC101 {reason}", text=text, expect={"train.graphs": 0})


FLOPS = "FlopCounterMode is active, and torch compiles nothing within a TorchDispatchMode"
OFF = "TORCH_COMPILE_DISABLE is set"
ONLY_IN_HOOK = f"CC101 ^target 'other' ran in the train phase without a compiled graph: {FLOPS}"
LIMIT_IN_VALIDATION = "CC103 ^target 'net' reached torch's recompile limit in the infer phase"
COUNTER = r"CC103 value of 'calls': no longer.*a buffer in its place avoids it \[CC103"
ITEM = r"next: train has \d graph breaks? \(.*\.py:\d+\): "
# Calls within a transform are counted, and the other calls are compiled.
TRANSFORM = {"graphs": 1, "diagnostics.eager_calls": {"net": 8}, "diagnostics.steps.compiled": 8}
TRANSFORM |= {"diagnostics.compiled_samples": 5, "verdict": "too few samples"}
CASES = [
    uncompiled("dispatch mode", lambda: CallsInTraining(mlp(), counts_flops), FLOPS),
    uncompiled("backward hook", with_backward_hook, "Module-level backwards hooks require compiled autograd"),
    # It is said before the first compiled step, which this run does not reach, and once.
    case("disabled", Classifier, f"CC101 ^{OFF}", baseline_steps=9, inside=DISABLED, expect={"train.graphs": 0}),
    case("disabled, compiled steps", Classifier, f"CC101 ^{OFF}", text=f"not compiled: .*{OFF}, see CC101",
         inside=DISABLED, expect={"train.graphs": 0}),
    # A target that only a hook calls has the reason of its calls.
    case("dispatch mode in a hook", CountsFlopsInHook, ONLY_IN_HOOK, targets=["net", "other"],
         expect={"train.graphs": 1}),
    case("transform", lambda: CallsInTraining(normalized(), penalized), "CC108", baseline_steps=2, train=12,
         expect={f"train.{name}": value for name, value in TRANSFORM.items()}),
    # The phase that reaches the recompile limit is the one that is named.
    case("limit in validation", lambda: TagsInValidation(Calls(mlp(), tagged)), LIMIT_IN_VALIDATION, data=(4,) * 20,
         inside=LIMIT, trainer={"max_epochs": 2}, expect={"train.fallbacks": 0, "infer.fallbacks": 1}),
    case("counter", net(Scaled), COUNTER, text="explain CC103", inside=LIMIT, train_mode={"dynamic": False},
         expect={"train.graphs": 3, "train.fallbacks": 1}),
    # The first graph break is the cause of what follows.
    case("item", lambda: Classifier(Calls(mlp(), scaled)), text=ITEM, expect={"train.fallbacks": 0}),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_message_names_the_cause_and_its_advice_helps(case):
    report = check(case).report
    events = [*report.train.diagnostics.events, *report.infer.diagnostics.events]
    assert "___stack" not in str(events)
    assert str(Path(compile_callbacks.__file__).parent) not in str([event.get("file") for event in events])


def test_on_error_raise_gives_the_reason_of_a_run_that_continues():
    raises = case("differentiates", lambda: Repeated(critic, normalized()), on_error="raise", baseline_steps=2)
    with pytest.raises(CompileError, match="create_graph=True"):
        run(raises, InductorCompile(**raises.settings))
