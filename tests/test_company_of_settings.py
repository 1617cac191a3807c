"""`InductorCompile` with what else people set: precision, checkpointing, hooks, an early stop, a resumed epoch."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from against_eager import assert_run_equals_eager, assert_same_values
from lightning.pytorch.callbacks import ModelCheckpoint
from models import CLASSES, Classifier, loader, seeded, trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import InductorCompile

pytestmark = pytest.mark.newest


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


def test_bf16_mixed_equals_eager():
    settings = {"precision": "bf16-mixed"}
    _, compiled, _ = assert_run_equals_eager(
        lambda *ours: fit(*ours, make=Plain, **settings), settings=settings, close=BFLOAT16
    )
    assert {out.dtype for out in compiled.validation_outputs} == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_mixed_precision_on_a_gpu_equals_eager(precision):
    settings = {"precision": precision, "accelerator": "cuda"}
    assert_run_equals_eager(lambda *ours: fit(*ours, make=Plain, **settings), settings=settings, close=BFLOAT16)


# ------------------------------------------------------------------------------------------ activation checkpointing


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Checkpointed(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, CLASSES)))


def test_activation_checkpointing_equals_eager():
    _, _, report = assert_run_equals_eager(lambda *ours: fit(*ours, make=Checkpointed))
    assert report.train.graph_breaks == 0


# ------------------------------------------------------------------------------------------ hooks


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self, module, *args):
        self.calls += 1


def doubles(module, args, output):
    return 2 * output


class Hooks(pl.Callback):
    """Registers hooks on parts of the module at one batch, and removes them at another."""

    def __init__(self, register, start=0, stop=None):
        self.register = register
        self.start = start
        self.stop = stop

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.start:
            self.handles = self.register(pl_module)
        if trainer.global_step == self.stop:
            for handle in self.handles:
                handle.remove()


@pytest.mark.parametrize("start", [0, 3], ids=["at-first", "while-training"])
@pytest.mark.parametrize("stop", [None, 6], ids=["for-good", "for-a-while"])
def test_hooks_that_change_outputs_equal_eager(start, stop):
    def register(module):
        return [module.net.register_forward_hook(doubles), module.net[0].register_forward_hook(doubles)]

    def run(*ours):
        return fit(*ours, Hooks(register, start, stop))

    eager, _, _ = assert_run_equals_eager(run)
    assert eager.losses[start] != fit().losses[start]


@pytest.mark.parametrize("part", ["net", "net.0"])
@pytest.mark.parametrize(
    ("start", "calls"),  # training, validation, prediction
    [(0, 6 + 4 + 2), (3, 3 + 2 + 2)],
    ids=["at-first", "while-training"],
)
def test_hooks_that_count_count_every_call(part, start, calls):
    counters = []

    def run(*ours):
        counters.append(Counter())
        hooks = Hooks(lambda module: [module.get_submodule(part).register_forward_hook(counters[-1])], start)
        return fit(*ours, hooks, max_steps=6, val_check_interval=3)

    assert_run_equals_eager(run)
    eager, ours = counters
    assert ours.calls == eager.calls == calls


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


class StopsAt(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step >= self.step


@pytest.mark.parametrize("min_steps", [None, 7])
def test_a_run_that_is_stopped_early_equals_eager(min_steps):
    eager, _, _ = assert_run_equals_eager(lambda *ours: fit(*ours, StopsAt(5), min_steps=min_steps))
    assert len(eager.losses) == (8 if min_steps else 5)  # once begun, Lightning ends the epoch


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("baseline_steps", [0, 2])
def test_resuming_in_the_middle_of_an_epoch_equals_eager(baseline_steps, tmp_path):
    def first(folder, *ours):
        saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
        fit(*ours, saver, enable_checkpointing=True, max_steps=13)
        return folder / "step=12.ckpt"

    checkpoints = {
        True: first(tmp_path / "ours", InductorCompile(baseline_steps=baseline_steps)),
        False: first(tmp_path / "eager"),
    }

    def resume(*ours):
        module = seeded(Classifier)
        trainer(*ours, max_epochs=3).fit(module, loader(), loader(2, seed=2), ckpt_path=checkpoints[bool(ours)])
        return module

    eager, _, _ = assert_run_equals_eager(resume, baseline_steps=baseline_steps, infer_compiles=not baseline_steps)
    assert len(eager.losses) == 4 + 8
    without_ours = seeded(Classifier)
    trainer(max_epochs=3).fit(without_ours, loader(), loader(2, seed=2), ckpt_path=checkpoints[True])
    assert_same_values(without_ours, eager)
