"""`assert_same_training` finds where compiled training differs from eager training, and accepts what is equal."""

from __future__ import annotations

import math
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.testing import assert_same_training
from tests.cases.zoo import PythonState
from tests.support.models import Classifier, Manual, Wrapper, loader, mlp
from tests.support.passes import WrongForward

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch 2.11 by hand
]

CPU = {"accelerator": "cpu", "devices": 1}


def assert_same(make, callback=None, *, data=lambda: loader(4), steps=8, trainer_kwargs=None, **arguments):
    kwargs = {**CPU, **(trainer_kwargs or {})}
    return assert_same_training(make, data, steps=steps, callback=callback, trainer_kwargs=kwargs, **arguments)


def by_hand(**options):
    """A user's own ``torch.compile``."""
    return LambdaCallback(on_fit_start=lambda trainer, pl_module: pl_module.net.compile(options=options))


WRONG = {"post_grad_custom_post_pass": lambda graph: WrongForward(None)(graph, False)}
DIFFERENT = r"different: in step \d, .* has a relative error of .*, eager "


@pytest.mark.parametrize(
    ("net", "options", "value"),
    [(Wrapper, WRONG, "gradient"), (lambda: PythonState("full deque"), {}, "loss loss")],
)
def test_training_compiled_by_hand_that_differs_is_found(net, options, value):
    with pytest.raises(AssertionError, match=DIFFERENT) as raised:
        assert_same(lambda: Classifier(net()), by_hand(**options))
    assert value in str(raised.value)


class Ordinary(Classifier):
    """Dropout, batch norm, AdamW, gradient clipping, a scheduler, logged metrics, counters and random numbers."""

    def __init__(self):
        super().__init__(Wrapper(mlp().insert(3, nn.Dropout())))
        self.draws = random.Random(0)
        self.register_buffer("phases", torch.zeros(2, dtype=torch.complex64))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx) * (1 + self.draws.random())
        self.log("train_loss", loss)
        return {"loss": loss, "noise": float(np.random.rand())}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def data():
    module = pl.LightningDataModule()
    module.train_dataloader, module.val_dataloader = lambda: loader(4), lambda: loader(2, seed=1)
    return module


@pytest.mark.parametrize(
    ("make", "graphs", "settings"),
    [
        (Ordinary, 1, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        (Manual, 2, {}),
    ],
)
def test_ordinary_training_is_the_same(make, graphs, settings):
    callback, settings = InductorCompile(baseline_steps=0), {"num_sanity_val_steps": 1, **settings}
    states = random.getstate(), torch.get_rng_state().tolist()
    assert assert_same(make, callback, data=data, steps=12, trainer_kwargs=settings) == "same"
    assert (callback.report.train.graphs, callback.report.infer.graphs > 0) == (graphs, True)
    assert (random.getstate(), torch.get_rng_state().tolist()) == states


def meddles(meddle, at=2):
    """Compiles something, and changes one thing at a batch, the third one."""

    def change(trainer, pl_module, batch, batch_idx):
        if batch_idx == at:
            meddle(trainer, pl_module)

    compiles = lambda *args: torch.compile(torch.sin, backend="eager")(torch.ones(1))  # noqa: E731
    return LambdaCallback(on_fit_start=compiles, on_train_batch_start=change)


MEDDLINGS = {
    "gradient of net.net.0": lambda t, m: m.net.net[0].weight.data.mul_(1.1),
    "buffer phases": lambda t, m: m.phases.add_(1j),
    "optimizer 0 param_groups 0 lr": lambda t, m: t.optimizers[0].param_groups[0].update(lr=0.02),
    "attribute of net note 0": lambda t, m: setattr(m.net, "note", ["changed"]),
    "attribute of the module draws": lambda t, m: m.draws.random(),
    "random generator numpy": lambda t, m: np.random.rand(),
    "metric other": lambda t, m: m.log("other", 1.0),
}


@pytest.mark.parametrize("value", MEDDLINGS)
def test_a_single_change_is_found_in_its_step(value):
    with pytest.raises(AssertionError, match="different: in step 3, ") as raised:
        assert_same(Ordinary, meddles(MEDDLINGS[value]), steps=4)
    assert value in str(raised.value)


class Chaotic(Classifier):
    """Amplifies rounding with each step."""

    def training_step(self, batch, batch_idx):
        scale = self.net[0].weight.detach().double().sum()
        for _ in range(40):
            scale = (3.9 * scale.abs().frac() * (1 - scale.abs().frac())).abs()
        return super().training_step(batch, batch_idx) * (1 + scale)


def test_chaotic_training_cannot_be_told_and_fails_unless_allowed():
    rounds = meddles(lambda t, m: m.net[0].weight.data.mul_(1 + 2**-23), at=0)
    with pytest.raises(AssertionError, match=r"cannot tell: in step \d, loss"):
        assert_same(Chaotic, rounds)
    assert assert_same(Chaotic, rounds, allow_cannot_tell=True) == "cannot tell"


def test_what_compiles_or_compares_nothing_proves_nothing():
    with pytest.raises(AssertionError, match="torch compiled nothing"):
        assert_same(Classifier, pl.Callback())
    for wrong in ({"steps": 0}, {"steps": 2.5}, {"tolerance": math.nan}, {"tolerance": "0.1"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            assert_same(Classifier, **wrong)
