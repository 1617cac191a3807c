"""A Trainer call in a hook or step of another one, with the same callback: the outer call continues as before."""

from __future__ import annotations

import copy
import json

import lightning.pytorch as pl
import pytest
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import FILE_NAME
from tests.support.models import FEATURES, Classifier, fit, loader, trainer
from tests.support.wrong_passes import WrongForward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


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
