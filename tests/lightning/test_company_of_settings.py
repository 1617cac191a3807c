"""`InductorCompile` with what else people set: precision, checkpointing, hooks, an early stop, a resumed epoch."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.against_eager import assert_run_equals_eager, assert_same_values
from tests.support.models import CLASSES, Classifier, loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


def fit(*callbacks, make=Classifier, **settings):
    module = seeded(make)
    trainer(*callbacks, max_epochs=2, **settings).fit(module, loader(), loader(2, seed=2))
    return module


# ------------------------------------------------------------------------------------------ precision

# Numbers of bfloat16 between 1 and 2 lie 2^-7 apart, and Inductor, which fuses, rounds to them less often than eager
# does. Two such steps are allowed; seen after 16 optimizer steps: half of one, and eager's distance to float32 is one.
BFLOAT16 = {"rtol": 2.0**-6, "atol": 2.0**-6}


class Plain(Classifier):
    """No batch norm, whose division by a small variance makes a rounding large."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, CLASSES)))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_on_a_gpu_equals_eager(precision):
    settings = {"precision": precision, "accelerator": "cuda"}
    assert_run_equals_eager(lambda *ours: fit(*ours, make=Plain, **settings), settings=settings, close=BFLOAT16)


# ------------------------------------------------------------------------------------------ activation checkpointing


# ------------------------------------------------------------------------------------------ hooks


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self, module, *args):
        self.calls += 1


class Hooks(pl.Callback):
    """Registers a hook on a part of the module at one batch."""

    def __init__(self, part, hook, start):
        self.part, self.hook, self.start = part, hook, start

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.start:
            pl_module.get_submodule(self.part).register_forward_hook(self.hook)


@pytest.mark.parametrize("part", ["net", "net.0"])
def test_hooks_that_are_registered_while_training_count_every_call(part):
    counters = []

    def run(*ours):
        counters.append(Counter())
        return fit(*ours, Hooks(part, counters[-1], 3), max_steps=6, val_check_interval=3)

    assert_run_equals_eager(run)
    eager, ours = counters
    assert ours.calls == eager.calls == 3 + 2 + 2  # training, validation, prediction


# ------------------------------------------------------------------------------------------ the trainer's loop


class Rivals(Plain):
    """Two networks that train in turn, each frozen while the other does, as in a GAN."""

    def __init__(self):
        super().__init__()
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
    assert_run_equals_eager(lambda *ours: fit(*ours, make=Rivals))


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_resuming_in_the_middle_of_an_epoch_equals_eager(tmp_path):
    def first(folder, *ours):
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit(*ours, saver, enable_checkpointing=True, max_steps=13)
        return folder / "step=12.ckpt"

    checkpoints = {
        True: first(tmp_path / "ours", InductorCompile(baseline_steps=2)),
        False: first(tmp_path / "eager"),
    }

    def resume(*ours):
        module = seeded(Classifier)
        trainer(*ours, max_epochs=3).fit(module, loader(), loader(2, seed=2), ckpt_path=checkpoints[bool(ours)])
        return module

    eager, _, _ = assert_run_equals_eager(resume, baseline_steps=2, infer_compiles=False)
    assert len(eager.losses) == 4 + 8
    without_ours = seeded(Classifier)
    trainer(max_epochs=3).fit(without_ours, loader(), loader(2, seed=2), ckpt_path=checkpoints[True])
    assert_same_values(without_ours, eager)
