"""`assert_same_training` finds where compiled training differs from eager training, and accepts what is equal."""

from __future__ import annotations

import collections
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from packaging.version import Version
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.testing import assert_same_training
from tests.compile.test_captures import function_that
from tests.support.models import CLASSES, FEATURES, Classifier, Manual, Wrapper, loader
from tests.support.wrong_passes import WrongForward

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # torch 2.11 by hand
]

OLD = Version(torch.__version__) < Version("2.13")
CPU = {"accelerator": "cpu", "devices": 1}


class CompilesByHand(pl.Callback):
    """What a user writes without this library."""

    def __init__(self, **options) -> None:
        self.options = options

    def on_fit_start(self, trainer, pl_module):
        pl_module.net.compile(options=self.options)


def assert_same(make, callback=None, *, steps=8, **arguments):
    arguments["trainer_kwargs"] = {**CPU, **arguments.get("trainer_kwargs", {})}
    return assert_same_training(make, lambda: loader(4), steps=steps, callback=callback, **arguments)


# ------------------------------------------------------------------------------------------ what by hand is not eager


class Samples(Wrapper):
    def forward(self, x):
        return self.net(x) * (1 + random.sample(range(9), 3)[0])


class Remembers(Wrapper):
    def __init__(self):
        super().__init__(nn.Linear(FEATURES, CLASSES))
        self.last = collections.deque(maxlen=3)

    def forward(self, x):
        self.last.append(x.mean())
        return self.net(x) * sum(self.last)


class Spectral(Wrapper):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)))
        nn.utils.spectral_norm(self.net[0])
        nn.utils.spectral_norm(self.net[2])


BY_HAND = {
    "random_sample": (Samples, {}, "random generator random"),
    "full_deque": (Remembers, {}, "gradient"),
    "own_function": (lambda: Wrapper(function_that("add in place")), {}, "gradient of net.net.layer"),
    "spectral_norm": (Spectral, {}, "net.net.2.weight_"),
    "wrong_pass": (Wrapper, {"post_grad_custom_post_pass": WrongForward(None)}, "gradient"),
}
EAGER_BY_HAND = {"random_sample": OLD, "own_function": not OLD}
"""Cases in which torch's own code is right on one of the versions."""


@pytest.mark.parametrize("name", BY_HAND)
def test_training_compiled_by_hand_differs(name):
    net, options, value = BY_HAND[name]
    callback = CompilesByHand(**options)
    if EAGER_BY_HAND.get(name):
        assert assert_same(lambda: Classifier(net()), callback) == "same"
        return
    with pytest.raises(
        AssertionError, match=r"different: in step \d, .* has a relative error of .*, eager .*"
    ) as raised:
        assert_same(lambda: Classifier(net()), callback)
    assert value in str(raised.value)


WITH_OURS = {
    "random_sample": lambda: None,
    "own_function": lambda: None,
    "spectral_norm": lambda: None,
    "wrong_pass": lambda: InductorCompile(passes=[WrongForward("train")], baseline_steps=0, verify="eager"),
}


@pytest.mark.parametrize("name", WITH_OURS)
def test_training_with_the_callback_is_eager_training(name):
    net = BY_HAND[name][0]
    assert assert_same(lambda: Classifier(net()), WITH_OURS[name]()) == "same"


# ------------------------------------------------------------------------------------------ what is compared


class Ordinary(Classifier):
    """Dropout, batch norm, AdamW, gradient clipping, a scheduler, logged metrics, counters and random numbers."""

    def __init__(self):
        net = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(), nn.Linear(16, CLASSES)
        )
        super().__init__(Wrapper(net))
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


@pytest.mark.parametrize("make", [Ordinary, Manual])
def test_ordinary_training_is_the_same(make):
    callback = InductorCompile("default", "default", baseline_steps=0)
    settings = {**CPU, "num_sanity_val_steps": 1}
    settings |= {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2} if make is Ordinary else {}
    states = random.getstate(), torch.get_rng_state()
    assert assert_same_training(make, data, steps=12, callback=callback, trainer_kwargs=settings) == "same"
    assert (callback.report.train.graphs, callback.report.infer.graphs > 0) == (1 if make is Ordinary else 2, True)
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())


def test_reduced_precision_is_the_same_within_its_rounding():
    assert assert_same(Ordinary, trainer_kwargs={"precision": "bf16-mixed"}) == "same"


class Meddles(CompilesByHand):
    """Compiles, and changes one thing at the third batch."""

    def __init__(self, meddle) -> None:
        super().__init__()
        self.meddle = meddle

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            self.meddle(trainer, pl_module)


MEDDLINGS = {
    "weight": (lambda t, m: m.net.net[0].weight.data.mul_(1.1), "gradient of net.net.0"),
    "buffer": (lambda t, m: m.net.net[1].running_var.mul_(1.1), "buffer net.net.1.running_var"),
    "imaginary": (lambda t, m: m.phases.add_(1j), "buffer phases"),
    "optimizer": (lambda t, m: t.optimizers[0].param_groups[0].update(lr=0.02), "optimizer 0 param_groups 0 lr"),
    "attribute": (lambda t, m: setattr(m.net, "note", ["changed"]), "attribute of net note 0"),
    "own_generator": (lambda t, m: m.draws.random(), "attribute of the module draws"),
    "python": (lambda t, m: random.random(), "random generator random"),
    "numpy": (lambda t, m: np.random.rand(), "random generator numpy"),
    "hook": (lambda t, m: t.profiler.start("[LightningModule]Ordinary.on_train_epoch_start"), "hook "),
    "metric": (lambda t, m: m.log("other", 1.0), "metric other"),
}


@pytest.mark.parametrize("name", MEDDLINGS)
def test_a_single_change_is_found_in_its_step(name):
    meddle, value = MEDDLINGS[name]
    with pytest.raises(AssertionError, match="different: in step 3, ") as raised:
        assert_same(Ordinary, Meddles(meddle), steps=4)
    assert value in str(raised.value)


class Chaotic(Classifier):
    """Amplifies rounding with each step."""

    def training_step(self, batch, batch_idx):
        scale = self.net.net[0].weight.detach().double().sum()
        for _ in range(40):
            scale = (3.9 * scale.abs().frac() * (1 - scale.abs().frac())).abs()
        return super().training_step(batch, batch_idx) * (1 + scale)


class RoundsOtherwise(CompilesByHand):
    def on_fit_start(self, trainer, pl_module):
        super().on_fit_start(trainer, pl_module)
        pl_module.net.net[0].weight.data.mul_(1 + 2**-23)


def test_chaotic_training_cannot_be_told_and_fails_unless_allowed():
    with pytest.raises(AssertionError, match=r"cannot tell: in step \d, loss"):
        assert_same(lambda: Chaotic(Wrapper()), RoundsOtherwise())
    assert assert_same(lambda: Chaotic(Wrapper()), RoundsOtherwise(), allow_cannot_tell=True) == "cannot tell"


def test_a_run_that_compiles_nothing_proves_nothing():
    with pytest.raises(AssertionError, match="torch compiled nothing"):
        assert_same(Classifier, pl.Callback())
