"""`InductorCompile` next to other callbacks, to a second one of its kind, and to Trainer calls within a run."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.report.file import FILE_NAME
from tests.support.against_eager import (
    assert_run_equals_eager,
    assert_same_fit,
    assert_same_module,
    assert_same_values,
)
from tests.support.models import CLASSES, FEATURES, Classifier, RecordingLogger, fit, loader, mlp, seeded, trainer
from tests.support.step_times import Times
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


def pair(**settings):
    return [InductorCompile(targets=[name], **settings) for name in ("backbone", "head")]


def test_each_compiles_its_targets_and_the_first_reports_the_step_times(tmp_path):
    logger = RecordingLogger()
    backbone = InductorCompile("default", InductorConfig(dynamic=False), targets=["backbone"], baseline_steps=4)
    head = InductorCompile("lite", "eager", targets=["head"], baseline_steps=0)
    graphs_of_head = []

    class Counts(pl.Callback):
        def on_train_batch_end(self, *args):
            graphs_of_head.append(head.report.train.graphs)

    parts = backbone, head, Counts()
    assert_same_fit(*parts, make=TwoParts, train=20, logger=logger, default_root_dir=tmp_path)
    train, infer = (backbone.report.train, head.report.train), (backbone.report.infer, head.report.infer)
    assert [(report.mode, report.targets, report.graphs) for report in train] == [
        ("default", ("backbone",), 1),
        ("lite", ("head",), 1),
    ]
    assert [report.targets for report in infer] == [("backbone",), ()]
    # The first two of the six eager steps are warm-up steps.
    assert graphs_of_head.index(1) == 6
    assert train[0].samples >= 4
    assert train[1].diagnostics.series == ()
    assert (train[1].eager_step_ms, train[1].compiled_step_ms, train[1].samples) == (None, None, None)

    logged = {name for metrics, _ in logger.calls for name in metrics}
    assert {"compile/train/seconds", "compile/train/head/seconds", "step/train/compiled_ms"} <= logged
    assert {name for name in logged if "head" in name and not name.startswith("compile/train/head/")} == set()
    records = json.loads(Path(tmp_path, FILE_NAME).read_text())
    assert [(record["call"], record["name"]) for record in records] == [("fit", ""), ("fit", "head")]
    assert [record["report"]["train"]["targets"] for record in records] == [["backbone"], ["head"]]


def test_targets_none_compiles_the_other_parts_of_a_module_that_contains_a_target_of_the_other():
    rest, linear = InductorCompile(baseline_steps=0), InductorCompile(targets=["backbone.0"], baseline_steps=0)
    assert_same_fit(rest, linear, make=TwoParts)
    assert linear.report.train.targets == ("backbone.0",)
    assert {"head", "backbone.3"} <= set(rest.report.train.targets)
    assert not {"forward", "backbone", "backbone.0"} & set(rest.report.train.targets)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (None, None, r"InductorCompile\('max-autotune', targets=\['net'\]\)"),
        (["backbone"], ["head", "backbone"], "overlapping targets: 'backbone' and 'backbone'"),
        (["backbone.*"], ["backbone"], r"overlapping targets: 'backbone\.0' and 'backbone'"),
        (["head"], ["forward"], "overlapping targets: 'head' and 'forward'"),
        (["head"], ["head.forward"], r"overlapping targets: 'head' and 'head\.forward'"),
    ],
)
def test_overlapping_targets_are_refused_at_the_start(one, other, message):
    module = seeded(TwoParts)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(InductorCompile(targets=one), InductorCompile(targets=other)).fit(module, loader(2))
    assert not module._load_state_dict_pre_hooks


def test_a_checkpoint_has_the_state_of_each_and_a_resumed_run_measures_no_baseline(tmp_path):
    fit(*pair(baseline_steps=4), make=TwoParts, train=20).trainer.save_checkpoint(tmp_path / "run.ckpt")
    states = torch.load(tmp_path / "run.ckpt", weights_only=True)["compile_callbacks"]
    assert {key: state["report"]["train"]["targets"] for key, state in states.items()} == {
        "['backbone']": ["backbone"],
        "['head']": ["head"],
    }

    backbone, head = pair(baseline_steps=4)
    fit(backbone, head, make=TwoParts, train=20, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert backbone.report.before.train.targets == ("backbone",)
    assert head.report.before.train.targets == ("head",)
    assert backbone.report.train.diagnostics.restored
    assert [series["kind"] for series in backbone.report.train.diagnostics.series] == ["compiling", "compiled"]


def test_the_callback_that_tunes_a_phase_measures_its_steps(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    backbone = InductorCompile("default", None, targets=["backbone"], baseline_steps=4)
    head = InductorCompile(Tune(["default"], steps=5), None, targets=["head"])
    assert_same_fit(backbone, head, close={"rtol": 1e-3, "atol": 1e-4}, make=TwoParts, train=40)
    assert (head.report.train.mode, head.report.train.speedup) == ("default", 2.0)
    assert (backbone.report.train.graphs, backbone.report.train.samples) == (1, None)


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
def test_fit_stays_compiled_after_a_validation_in_a_hook(hook, ours_first, tmp_path):
    ours = compiler()
    inner = Validates(ours, hook, default_root_dir=tmp_path / "inner")
    callbacks = (ours, inner) if ours_first else (inner, ours)
    module = fit(*callbacks, make=Tells, default_root_dir=tmp_path / "outer", **SHORT)
    assert module.train_compiled == [True] * 6
    assert len(module.validation_compiled) > 2
    assert all(module.validation_compiled)
    assert (ours.report.train.graphs, ours.report.infer.graphs) == (1, 2)  # no_grad, and inference_mode
    assert not module._load_state_dict_pre_hooks
    assert "_compiled_call_impl" not in vars(module.net)
    for folder, call in (("outer", "fit"), ("inner", "validate")):
        assert {record["call"] for record in json.loads((tmp_path / folder / FILE_NAME).read_text())} == {call}


def test_fit_stays_compiled_after_a_validation_in_a_step():
    class InStep(Tells):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                Validates(ours).validate(self.trainer, self)
            return super().training_step(batch, batch_idx)

    ours = compiler()
    assert fit(ours, make=InStep, **SHORT).train_compiled == [True] * 6
