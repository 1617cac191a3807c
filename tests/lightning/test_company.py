"""`InductorCompile` next to other callbacks and settings: each run equals its eager twin."""

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
    ModelCheckpoint,
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

weight_averaging = pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no WeightAveraging"
)


@weight_averaging
@pytest.mark.parametrize(("name", "ours_first"), [("WeightAveraging", True), ("EMAWeightAveraging", False)])
def test_weight_averaging_equals_eager(name, ours_first):
    def run(*ours):
        average = getattr(lightning_callbacks, name)(**({"decay": 0.7} if name.startswith("EMA") else {}))
        return fit(*((*ours, average) if ours_first else (average, *ours)), val_check_interval=4)

    assert_run_equals_eager(run)


def test_stochastic_weight_averaging_equals_eager():
    def run(*ours):
        return fit(*ours, StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1))

    assert_run_equals_eager(run)


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


def find(make_finder, folder):
    def run(*ours):
        module = seeded(Tuned)
        settings = {"max_epochs": 3, "default_root_dir": folder}
        trainer(*ours, make_finder(), **settings).fit(module, val_dataloaders=loader(2, seed=2))
        return module

    return assert_run_equals_eager(run)


def test_the_learning_rate_finder_equals_eager(tmp_path):
    eager, compiled, report = find(lambda: LearningRateFinder(1e-3, 1.0, num_training_steps=16), tmp_path)
    assert compiled.lr == pytest.approx(eager.lr)
    assert eager.lr != 0.1
    assert report.before is None  # the finder restores the state of this run


def test_the_batch_size_finder_equals_eager(tmp_path):
    eager, compiled, _ = find(lambda: BatchSizeFinder("power", 2, init_val=4, max_trials=2), tmp_path)
    assert compiled.batch_size == eager.batch_size > 4


class RegistersAHook(pl.Callback):
    """Registers a hook that counts the calls of a part of the module, at the fourth batch."""

    def __init__(self, part):
        self.part, self.calls = part, 0

    def count(self, *args):
        self.calls += 1

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            pl_module.get_submodule(self.part).register_forward_hook(self.count)


@pytest.mark.parametrize("part", ["net", "net.0"])
def test_hooks_that_are_registered_while_training_count_every_call(part):
    hooks = []

    def run(*ours):
        hooks.append(RegistersAHook(part))
        return fit(*ours, hooks[-1], max_steps=6, max_epochs=2, val_check_interval=3)

    assert_run_equals_eager(run)
    assert [hook.calls for hook in hooks] == [3 + 2 + 2] * 2  # training, validation, prediction


# ------------------------------------------------------------------------------------------ loops and checkpoints

# Numbers of bfloat16 between 1 and 2 lie 2^-7 apart, and Inductor, which fuses, rounds to them less often than eager
# does. Two such steps are allowed; seen after 16 optimizer steps: half of one, and eager's distance to float32 is one.
BFLOAT16 = {"rtol": 2.0**-6, "atol": 2.0**-6}


class Plain(Classifier):
    """Without batch norm, whose division by a small variance makes a rounding large."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_on_a_gpu_equals_eager(precision):
    settings = {"precision": precision, "accelerator": "cuda", "max_epochs": 2}
    assert_run_equals_eager(lambda *ours: fit(*ours, make=Plain, **settings), settings=settings, close=BFLOAT16)


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


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_resuming_in_the_middle_of_an_epoch_equals_eager(tmp_path):
    def first(folder, *ours):
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit(*ours, saver, enable_checkpointing=True, max_steps=13, max_epochs=2)
        return folder / "step=12.ckpt"

    of_ours, of_eager = first(tmp_path / "ours", InductorCompile(baseline_steps=2)), first(tmp_path / "eager")
    eager, _, _ = assert_run_equals_eager(
        lambda *ours: fit(*ours, ckpt_path=of_ours if ours else of_eager), baseline_steps=2, infer_compiles=False
    )
    assert len(eager.losses) == 4 + 8
    assert_same_values(fit(ckpt_path=of_ours), eager)
