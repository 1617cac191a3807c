"""Trainer calls within a run: the rest of the outer run is eager."""

from __future__ import annotations

import copy
import json

import lightning.pytorch as pl
import pytest
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import FEATURES, Classifier, RecordingLogger, fit, loader, trainer
from tests.support.passes import WrongForward

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


class Validates(pl.Callback):
    """Calls ``validate`` in a hook, with another Trainer."""

    def __init__(self, hook, *callbacks, **settings):
        self.callbacks, self.settings = callbacks, settings
        setattr(self, hook, self.validate)

    def validate(self, outer, pl_module, *args):
        inner, state = trainer(*self.callbacks, **self.settings), copy.copy(vars(outer.state))
        inner.validate(pl_module, loader(2), verbose=False)
        vars(outer.state).update(state)
        pl_module.trainer = outer
        pl_module.train()


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_batch_end", "in_step", "on_train_epoch_start"])
def test_a_nested_validation_ends_the_compiled_part_of_a_fit(hook, tmp_path):
    passes, module = [WrongForward("train"), WrongForward("infer")], Tells()
    ours = InductorCompile(targets=["net"], passes=passes, baseline_steps=0, verify="off")
    inner = Validates(hook, ours, logger=RecordingLogger(tmp_path / "inner"))
    module.in_step = inner if hook == "in_step" else None
    settings = {"max_epochs": 2, "num_sanity_val_steps": 0, "logger": RecordingLogger(tmp_path / "outer")}
    with pytest.warns(CompileWarning, match="CC106"):
        fit(ours, inner, make=lambda: module, train=3, validation=1, **settings)
    assert "_compiled_call_impl" not in vars(module.net)
    assert not module._load_state_dict_pre_hooks
    compiled = {"on_train_epoch_end": 3, "on_train_batch_end": 1, "in_step": 1, "on_train_epoch_start": 0}[hook]
    assert module.train_compiled == [True] * compiled + [False] * (6 - compiled)
    assert any(module.validation_compiled)
    records = [tmp_path / folder / "compile_report.json" for folder in ("outer", "inner")]
    calls = [{record["call"] for record in json.loads(path.read_text())} if path.exists() else {} for path in records]
    assert calls == [{"fit"} if compiled else {}, {"validate"}]
