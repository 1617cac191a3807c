"""Runs whose values equal eager's and whose report has no surprise, with every row of settings."""

from __future__ import annotations

import contextlib
import functools

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import TorchPatcher
from torch.distributions import Distribution

from tests.cases import zoo
from tests.cases.case import Case, check, in_columns, net

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

# Without this option a compiled graph draws other numbers for dropout than eager.
SAME_DROPOUT = {"fallback_random": True}


def eager_calls(train, infer):
    return {"train.diagnostics.eager_calls": train, "infer.diagnostics.eager_calls": infer}


def averages():
    return [lightning_callbacks.EMAWeightAveraging(decay=0.7)]


def thaws():
    rates = {"lambda_func": lambda epoch: 1.5, "backbone_initial_lr": 0.05, "should_align": False}
    return [lightning_callbacks.BackboneFinetuning(1, train_bn=False, **rates)]


@contextlib.contextmanager
def validation():
    """Begin as a process that has not called ``torch.compile``, and assert that the runs restore the validation."""
    TorchPatcher.patch.cache_clear()
    before, Distribution._validate_args = Distribution._validate_args, True
    yield
    assert Distribution._validate_args
    Distribution._validate_args = before


ONLY_TRAIN = {"validation": None, "predict": None, "callback": {"infer_mode": None}}
BASELINE = ONLY_TRAIN | {"train": (4,) * 24, "callback": {"baseline_steps": 10, "infer_mode": None}}
RECURRENT = zoo.logits(
    lambda m, x: m.net(m.rnn(x[:, None])[0][:, 0]), rnn=lambda: nn.GRU(8, 8, batch_first=True), net=zoo.linear()
)
CASES = [
    *in_columns(Case(name="mlp")),
    Case(name="accumulated gradients", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    Case(name="dropout", make=net(zoo.dropout), callback={"train_mode": {"options": SAME_DROPOUT}}),
    Case(
        name="average of weights",
        others=averages if hasattr(lightning_callbacks, "EMAWeightAveraging") else list,
        trainer={"val_check_interval": 2, "max_epochs": 3},
    ),
    Case(
        name="backbone that thaws",
        make=zoo.TwoParts,
        others=thaws,
        trainer={"max_epochs": 2},
        expect=eager_calls({"backbone": 6}, {"forward": 2}) | {"train.graphs": 2},
    ),
    Case(name="distributions", make=net(zoo.Policy), callback={"targets": "net"}, inside=validation),
    Case(name="step", make=zoo.PlainStep, callback={"targets": ["training_step"], "infer_mode": None}),
    Case(name="tensor subclass", make=net(zoo.tensor_subclass), expect={"train.verified": "outputs only 1"}),
    Case(name="swapped weights", make=zoo.SwapsWeights, predict=None, trainer={"inference_mode": True}),
    Case(name="rnn", make=RECURRENT, expect={"train.targets": ["net"]}, **BASELINE),
]


RAGGED = {
    "train": (4, 4, 4, 4, 4, 2),
    "validation": (4, 2),
    "predict": (4, 2),
    "trainer": {"max_epochs": 2, "gradient_clip_val": 0.1},
}
EAGER = eager_calls({"net": 2}, {"net": 3})  # too few calls have the size of the last batches for a second graph
FREEZING = {"train_mode": {"options": SAME_DROPOUT}, "infer_mode": {"options": {"freezing": True}}, "targets": "net"}
GENERATED = [
    Case(name="convolutions", make=net(zoo.convolutions), callback=FREEZING, expect=EAGER | {"infer.graphs": 2},
         **RAGGED),
    Case(name="transformer", make=net(zoo.transformer), callback={"targets": "net"}, expect=EAGER, **RAGGED),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_equals_eager(case):
    check(case)


@pytest.mark.codegen
@pytest.mark.parametrize("case", GENERATED, ids=str)
def test_a_run_of_generated_code_equals_eager(case):
    check(case)


BATCH_NORM = Case(
    name="batch norm",
    make=zoo.CallsTwice,
    train=(20,) * 24,
    **ONLY_TRAIN | {"callback": {"train_mode": {"dynamic": False}, "infer_mode": "eager", "targets": "net"}},
    expect=eager_calls({"net": 18}, {}) | {"train.graphs": 3, "train.recompiles": 2, "train.fallbacks": 1},
    codes=("CC103",),
    inside=functools.partial(torch._dynamo.config.patch, recompile_limit=3),
)


@pytest.mark.usefixtures("recompiles_at_once")
def test_eager_and_compiled_calls_of_a_batch_norm_share_a_step():
    check(BATCH_NORM)
