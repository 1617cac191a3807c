"""`InductorCompile` next to other callbacks and settings: each run equals its eager twin."""

from __future__ import annotations

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
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


def fit(*callbacks, make=Classifier, ckpt_path=None, **settings):
    module = seeded(make)
    settings = {"max_epochs": 3} | settings
    trainer(*callbacks, **settings).fit(module, loader(), loader(2, seed=2), ckpt_path=ckpt_path)
    return module


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMAWeightAveraging"
)
def test_an_average_of_weights_equals_eager():
    def run(*ours):
        return fit(lightning_callbacks.EMAWeightAveraging(decay=0.7), *ours, val_check_interval=4)

    assert_run_equals_eager(run)


def test_stochastic_weight_averaging_equals_eager():
    def run(*ours):
        return fit(*ours, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1))

    assert_run_equals_eager(run)


def test_pruning_equals_eager():
    def run(*ours):
        return fit(*ours, ModelPruning("l1_unstructured", amount=0.3, make_pruning_permanent=False))

    eager, compiled, _ = assert_run_equals_eager(run)
    assert (eager.net[0].weight == 0).float().mean() > 0.3
    assert "net.0.weight_mask" in compiled.state_dict()


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
    """Freezes the backbone in the last epoch, and keeps its weight after each epoch."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            BackboneFinetuning.freeze(pl_module.backbone, train_bn=False)

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(pl_module.backbone[0].weight.detach().clone())


@pytest.mark.parametrize(("train_bn", "baseline_steps"), [(True, 0), (False, 2)])
def test_parameters_that_freeze_and_thaw_equal_eager(train_bn, baseline_steps):
    histories = []

    def run(*ours):
        thaw = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, train_bn=train_bn, should_align=False)
        histories.append(FreezesAgain())
        return fit(*ours, thaw, histories[-1], make=Transfer)

    assert_run_equals_eager(run, baseline_steps=baseline_steps)
    for first, second, third in (history.seen for history in histories):
        assert not torch.equal(first, second)
        assert torch.equal(second, third)


class Rivals(Classifier):
    """Two networks that train in turn, each frozen while the other trains, as in a GAN."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)))
        self.rival = nn.Sequential(nn.Linear(CLASSES, 8), nn.ReLU(), nn.Linear(8, 1))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            self.toggle_optimizer(optimizer)
            out = self.net(batch[0])
            loss = nn.functional.cross_entropy(out, batch[1]) + sign * self.rival(out).square().mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net, self.rival)]


def test_networks_that_are_frozen_in_turn_in_every_step_equal_eager():
    assert_run_equals_eager(lambda *ours: fit(*ours, make=Rivals, max_epochs=2))


# ------------------------------------------------------------------------------------------ finders and hooks


class Tuned(Classifier):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.1, 4

    def train_dataloader(self):
        return loader(64 // self.batch_size, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    ("make_finder", "found"),
    [
        (lambda: LearningRateFinder(1e-3, 1.0, num_training_steps=16), "lr"),
        (lambda: BatchSizeFinder("power", 2, init_val=4, max_trials=2), "batch_size"),
    ],
)
def test_a_finder_finds_what_it_finds_in_eager(make_finder, found, tmp_path):
    def run(*ours):
        module = seeded(Tuned)
        settings = {"max_epochs": 3, "default_root_dir": tmp_path}
        trainer(*ours, make_finder(), **settings).fit(module, val_dataloaders=loader(2, seed=2))
        return module

    eager, compiled, report = assert_run_equals_eager(run)
    assert getattr(compiled, found) == pytest.approx(getattr(eager, found))
    assert getattr(eager, found) != getattr(Tuned(), found)
    assert report.before is None  # the finder restores the state of this run


class RegistersAHook(pl.Callback):
    """Registers a hook that counts the calls of a part of the module, at the fourth batch."""

    def __init__(self):
        self.calls = 0

    def count(self, *args):
        self.calls += 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            pl_module.net[0].register_forward_hook(self.count)


def test_a_hook_that_is_registered_while_training_counts_every_call():
    hooks = []

    def run(*ours):
        hooks.append(RegistersAHook())
        return fit(*ours, hooks[-1], max_steps=6, max_epochs=2, val_check_interval=3)

    assert_run_equals_eager(run)
    assert [hook.calls for hook in hooks] == [3 + 2 + 2] * 2  # training, validation, prediction


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
def test_a_checkpoint_on_exception_equals_eager_and_resumes(tmp_path):
    def fail(folder, *ours):
        module = seeded(FailsAt)
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
