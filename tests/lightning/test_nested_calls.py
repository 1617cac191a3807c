"""Trainer calls within a run: they run eagerly, and the outer run stays compiled."""

from __future__ import annotations

import copy
import json

import lightning.pytorch as pl
import pytest
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.models import FEATURES, Classifier, LoggerIn, fit, loader, trainer
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.usefixtures("no_codegen")


class Tells(Classifier):
    """Records whether each step ran compiled: a pass makes the outputs of ReLU negative."""

    in_step = None

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 3), nn.ReLU()))
        self.train_compiled, self.validation_compiled = [], []

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.in_step:
            self.in_step.validate(self.trainer, self)
        out = self.net(batch[0])
        self.train_compiled.append(bool((out < 0).any()))
        return out.sum()

    def validation_step(self, batch, batch_idx):
        self.validation_compiled.append(bool((self.net(batch[0]) < 0).any()))


class FailsTwice(pl.Callback):
    """Hides the end of a Trainer call from the callbacks after it."""

    def on_validation_start(self, *args):
        raise OSError("disk full")

    on_exception = on_validation_start


class Validates(pl.Callback):
    """Calls ``validate`` in a hook, with another Trainer, whose first callbacks may raise an error."""

    def __init__(self, hook, *callbacks, **settings):
        self.callbacks, self.settings = callbacks, settings
        setattr(self, hook, self.validate)

    def validate(self, outer, pl_module, *args):
        inner, state = trainer(*self.callbacks, **self.settings), copy.copy(vars(outer.state))
        try:
            inner.validate(pl_module, loader(2), verbose=False)
        except OSError:
            assert len(self.callbacks) > 1
        vars(outer.state).update(state)
        pl_module.trainer = outer
        pl_module.train()


@pytest.mark.parametrize(
    ("hook", "hidden", "nested"),
    [
        ("on_train_epoch_end", (), 4),
        ("on_train_batch_end", (), 12),
        ("in_step", (), 4),
        ("on_train_epoch_start", (FailsTwice(),), 0),
    ],
)
def test_a_nested_validation_runs_eagerly_and_fit_stays_compiled(hook, hidden, nested, tmp_path):
    """Also if another callback hides the end of the nested call."""
    passes, module = [WrongForward("train"), WrongForward("infer")], Tells()
    ours = InductorCompile(targets=["net"], passes=passes, baseline_steps=0, verify="off")
    inner = Validates(hook, *hidden, ours, logger=LoggerIn(tmp_path / "inner"))
    module.in_step = inner if hook == "in_step" else None
    callbacks = (inner, ours) if hook == "on_train_batch_end" else (ours, inner)
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "logger": LoggerIn(tmp_path / "outer")}
    fit(*callbacks, make=lambda: module, train=3, validation=1, **settings)
    assert "_compiled_call_impl" not in vars(module.net)
    assert ours.report.infer.graphs == 1
    assert sorted(module.validation_compiled) == [False] * nested + [True] * 2
    if hidden:
        return
    assert module.train_compiled == [True] * 6
    assert ours.report.train.graphs == 1
    assert not module._load_state_dict_pre_hooks
    report = tmp_path / "outer" / "compile_report.json"
    assert {record["call"] for record in json.loads(report.read_text())} == {"fit"}
    assert not (tmp_path / "inner" / report.name).exists()
