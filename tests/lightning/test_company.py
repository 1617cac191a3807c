"""`InductorCompile` next to other callbacks, and Trainer calls within a run."""

from __future__ import annotations

import copy
import json

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.report.data import FILE_NAME
from tests.support.against_eager import (
    assert_run_equals_eager,
    assert_same_module,
    assert_same_values,
)
from tests.support.models import CLASSES, FEATURES, Classifier, LoggerIn, Wrapper, fit, loader, mlp, seeded, trainer
from tests.support.wrong_passes import WrongForward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMAWeightAveraging"
)
def test_an_average_of_weights_equals_eager():
    def run(*ours):
        averages = lightning_callbacks.EMAWeightAveraging(decay=0.7)
        return fit(averages, *ours, val_check_interval=4, max_epochs=3)

    assert_run_equals_eager(run)


class TwoParts(Classifier):
    """A backbone and a head; its ``forward`` calls both."""

    def __init__(self):
        super().__init__(nn.Sequential(mlp(), nn.Linear(CLASSES, CLASSES)))
        self.backbone, self.head = self.net
        self.net = None

    def forward(self, x):
        return self.head(self.backbone(x))

    def logits(self, x):
        return self.head(self.backbone(x))


class Transfer(TwoParts):
    """Its backbone is frozen at first."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_a_backbone_that_thaws_equals_eager():
    def run(*ours):
        thaw = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, train_bn=False, should_align=False)
        module = fit(*ours, thaw, make=Transfer, max_epochs=2)
        assert not torch.equal(module.backbone[0].weight, seeded(Transfer).backbone[0].weight)
        return module

    assert_run_equals_eager(run, baseline_steps=2)


class FailsInTheSixthStep(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise OSError("disk full")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:.*was called without a model",
    "ignore:.*there is no last checkpoint available",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
def test_a_checkpoint_on_exception_equals_eager_and_resumes(tmp_path):
    def fail(folder, *ours):
        module = seeded(FailsInTheSixthStep)
        with pytest.raises(OSError, match="disk full"):
            trainer(*ours, OnExceptionCheckpoint(folder), enable_checkpointing=True).fit(module, loader(), loader(2))
        return module, torch.load(folder / "on_exception.ckpt", weights_only=False)

    ours = InductorCompile(baseline_steps=0)
    (eager, expected), (compiled, saved) = fail(tmp_path / "eager"), fail(tmp_path / "ours", ours)
    assert ours.report.train.graphs >= 1
    assert_same_module(compiled, eager)
    assert_same_values(compiled, eager)
    assert saved["global_step"] == expected["global_step"] == 5
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(saved[part], expected[part], rtol=1e-4, atol=1e-5)
    assert_run_equals_eager(lambda *ours: fit(*ours, max_epochs=2, ckpt_path=tmp_path / "ours" / "on_exception.ckpt"))


# ------------------------------------------------------------------------------------------ a second InductorCompile


@pytest.mark.parametrize("targets", [[None, None], [["backbone"], ["head"]]])
def test_a_second_callback_is_refused_before_the_run(targets):
    module = seeded(TwoParts)
    callbacks = [InductorCompile(targets=names) for names in targets]
    with pytest.raises(MisconfigurationException, match=r"more than one InductorCompile.*\['encoder', 'head'\]"):
        trainer(*callbacks).fit(module, loader(2))
    assert not module._load_state_dict_pre_hooks


@pytest.mark.parametrize("in_place", [True, False])
def test_a_part_that_the_user_compiled_and_no_target_names_keeps_its_settings(in_place):
    calls = []

    def backend(graph, inputs):
        return lambda *args: (calls.append(torch.is_grad_enabled()), graph.forward(*args))[1]

    module, callback = seeded(TwoParts), InductorCompile(targets=["head"], baseline_steps=0)
    module.backbone = Wrapper(module.backbone)
    if in_place:
        module.backbone.compile(backend=backend)
    else:
        module.backbone = torch.compile(module.backbone, backend=backend)
    trainer(callback, num_sanity_val_steps=0).fit(module, loader(4), loader(2))
    assert sorted(calls) == [False] * 2 + [True] * 4
    assert (callback.report.train.targets, callback.report.train.graphs) == (("head",), 1)


# ------------------------------------------------------------------------------------------ Trainer calls within a run


class Tells(Classifier):
    """Records whether each step ran compiled: a pass makes the outputs of ReLU negative."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 3), nn.ReLU()))
        self.train_compiled, self.validation_compiled = [], []

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.train_compiled.append(bool((out < 0).any()))
        return out.sum()

    def validation_step(self, batch, batch_idx):
        self.validation_compiled.append(bool((self.net(batch[0]) < 0).any()))


class Validates(pl.Callback):
    """Calls ``validate`` in a hook, with another Trainer."""

    def __init__(self, ours, hook="on_train_epoch_end", **settings):
        self.ours, self.settings = ours, settings
        setattr(self, hook, self.validate)

    def validate(self, outer, pl_module, *args):
        inner = trainer(self.ours, **self.settings)
        state = copy.copy(vars(outer.state))
        try:
            inner.validate(pl_module, loader(2), verbose=False)
        finally:
            vars(outer.state).update(state)
            pl_module.trainer = outer
            pl_module.train()


def compiler():
    passes = [WrongForward("train"), WrongForward("infer")]
    return InductorCompile(targets=["net"], passes=passes, baseline_steps=0, verify="off")


SHORT = {"train": 3, "validation": 1, "max_epochs": 2, "num_sanity_val_steps": 0}


@pytest.mark.parametrize(("hook", "ours_first"), [("on_train_epoch_end", True), ("on_train_batch_end", False)])
def test_a_validation_in_a_hook_runs_eagerly_and_fit_stays_compiled(hook, ours_first, tmp_path):
    ours = compiler()
    inner = Validates(ours, hook, logger=LoggerIn(tmp_path / "inner"))
    callbacks = (ours, inner) if ours_first else (inner, ours)
    module = fit(*callbacks, make=Tells, logger=LoggerIn(tmp_path / "outer"), **SHORT)
    assert module.train_compiled == [True] * 6
    nested = 2 * (2 if hook == "on_train_epoch_end" else 6)
    assert sorted(module.validation_compiled) == [False] * nested + [True] * 2
    assert (ours.report.train.graphs, ours.report.infer.graphs) == (1, 1)
    assert not module._load_state_dict_pre_hooks
    assert "_compiled_call_impl" not in vars(module.net)
    assert {record["call"] for record in json.loads((tmp_path / "outer" / FILE_NAME).read_text())} == {"fit"}
    assert not (tmp_path / "inner" / FILE_NAME).exists()


def test_fit_stays_compiled_after_a_validation_in_a_step():
    class InStep(Tells):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                Validates(ours).validate(self.trainer, self)
            return super().training_step(batch, batch_idx)

    ours = compiler()
    module = fit(ours, make=InStep, **SHORT)
    assert module.train_compiled == [True] * 6
    assert sorted(module.validation_compiled) == [False] * 4 + [True] * 2


class RaisesTwice(pl.Callback):
    """Hides the end of a Trainer call from the callbacks after it."""

    def on_validation_start(self, *args):
        raise OSError("disk full")

    def on_exception(self, *args):
        raise OSError("disk full")


def test_fit_is_compiled_again_after_a_nested_call_whose_end_another_callback_hides():
    class Fails(Validates):
        def validate(self, outer, pl_module, *args):
            inner = trainer(RaisesTwice(), self.ours)
            with pytest.raises(OSError, match="disk full"):
                inner.validate(pl_module, loader(2), verbose=False)
            pl_module.trainer = outer
            pl_module.train()

    ours = compiler()
    module = fit(ours, Fails(ours, "on_train_epoch_start"), make=Tells, **SHORT)
    assert ours.report.infer.graphs == 1
    assert "_compiled_call_impl" not in vars(module.net)
