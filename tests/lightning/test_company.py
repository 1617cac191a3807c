"""`InductorCompile` in the company of Lightning's callbacks: each with it and without, from one seed."""

from __future__ import annotations

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.against_eager import assert_run_equals_eager, assert_same_module, assert_same_values
from tests.support.models import CLASSES, Classifier, loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


def fit(*callbacks, make=Classifier, **settings):
    module = seeded(make)
    trainer(*callbacks, max_epochs=3, **settings).fit(module, loader(), loader(2, seed=2))
    return module


# ------------------------------------------------------------------------------------------ averaged weights

weight_averaging = pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no WeightAveraging"
)


@weight_averaging
@pytest.mark.parametrize(("name", "ours_first"), [("WeightAveraging", True), ("EMAWeightAveraging", False)])
def test_weight_averaging_equals_eager(name, ours_first):
    arguments = {"decay": 0.7} if name.startswith("EMA") else {}

    def run(*ours):
        average = getattr(lightning_callbacks, name)(**arguments)
        return fit(*((*ours, average) if ours_first else (average, *ours)), val_check_interval=4)

    assert_run_equals_eager(run)


def test_stochastic_weight_averaging_equals_eager():
    def run(*ours):
        swa = StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1)
        return fit(*ours, swa)

    assert_run_equals_eager(run)


# ------------------------------------------------------------------------------------------ changed parameters


@pytest.mark.parametrize("permanent", [True, False])
def test_pruning_equals_eager(permanent):
    def run(*ours):
        return fit(*ours, ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=permanent))

    eager, compiled, _ = assert_run_equals_eager(run)
    assert (eager.net[0].weight == 0).float().mean() > 0.3
    assert ("net.0.weight_mask" in compiled.state_dict()) == (not permanent)


class Transfer(Classifier):
    """A backbone that is frozen at first, and a head."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


class FreezesAgain(pl.Callback):
    """Freezes the backbone anew in the last epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            BackboneFinetuning.freeze(pl_module.backbone, train_bn=False)


@pytest.mark.parametrize(("train_bn", "baseline_steps"), [(True, 0), (False, 2)])
def test_parameters_that_freeze_and_thaw_equal_eager(train_bn, baseline_steps):
    backbones = []

    def run(*ours):
        thaw = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, train_bn=train_bn, should_align=False)
        history = Weights("backbone.0.weight")
        backbones.append(history.seen)
        return fit(*ours, thaw, FreezesAgain(), history, make=Transfer)

    assert_run_equals_eager(run, baseline_steps=baseline_steps)
    for start, first, second, third in backbones:
        assert torch.equal(start, first)
        assert not torch.equal(first, second)
        assert torch.equal(second, third)


class Weights(pl.Callback):
    """Keeps a parameter as it was at the start and after each epoch."""

    def __init__(self, name):
        self.name = name
        self.seen = []

    def keep(self, trainer, pl_module):
        self.seen.append(pl_module.get_parameter(self.name).detach().clone())

    on_train_start = on_train_epoch_end = keep


# ------------------------------------------------------------------------------------------ finders


class Tuned(Classifier):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.1, 4

    def train_dataloader(self):
        return loader(64 // self.batch_size, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_tuned(*callbacks, **settings):
    module = seeded(Tuned)
    trainer(*callbacks, max_epochs=3, **settings).fit(module, val_dataloaders=loader(2, seed=2))
    return module


def test_learning_rate_finder_equals_eager(tmp_path):
    def run(*ours):
        search = LearningRateFinder(min_lr=1e-3, max_lr=1.0, num_training_steps=16)
        return fit_tuned(*ours, search, default_root_dir=tmp_path)

    eager, compiled, report = assert_run_equals_eager(run)
    assert compiled.lr == pytest.approx(eager.lr)
    assert eager.lr != 0.1
    assert report.before is None  # what the finder restores is this run's own state


def test_batch_size_finder_equals_eager(tmp_path):
    def run(*ours):
        search = BatchSizeFinder("power", steps_per_trial=2, init_val=4, max_trials=2)
        return fit_tuned(*ours, search, default_root_dir=tmp_path)

    eager, compiled, _ = assert_run_equals_eager(run)
    assert compiled.batch_size == eager.batch_size > 4


# ------------------------------------------------------------------------------------------ loops and checkpoints


def test_a_schedule_of_gradient_accumulation_equals_eager():
    assert_run_equals_eager(lambda *ours: fit(*ours, GradientAccumulationScheduler({0: 1, 1: 3, 2: 2})))


class FailsAt(Classifier):
    batch: int | None = 5

    def training_step(self, batch, batch_idx):
        if batch_idx == self.batch:
            raise OSError("disk full")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:.*was called without a model",
    "ignore:.*there is no last checkpoint available",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
def test_checkpoint_on_exception_equals_eager_and_goes_on(tmp_path):
    def fail(folder, *ours):
        module = seeded(FailsAt)
        with pytest.raises(OSError, match="disk full"):
            trainer(*ours, OnExceptionCheckpoint(folder), enable_checkpointing=True).fit(module, loader(), loader(2))
        return module, folder / "on_exception.ckpt"

    eager, _ = fail(tmp_path / "eager")
    ours = InductorCompile(baseline_steps=0)
    compiled, checkpoint = fail(tmp_path / "ours", ours)
    assert ours.report.train.graphs >= 1
    assert_same_module(compiled, eager)
    assert_same_values(compiled, eager)

    saved, expected = (
        torch.load(tmp_path / which / "on_exception.ckpt", weights_only=False) for which in ("ours", "eager")
    )
    assert saved["global_step"] == expected["global_step"] == 5
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(saved[part], expected[part], rtol=1e-4, atol=1e-5)

    def go_on(*ours):
        module = seeded(FailsAt)
        module.batch = None
        trainer(*ours, max_epochs=2).fit(module, loader(), loader(2), ckpt_path=checkpoint)
        return module

    assert_run_equals_eager(go_on)
