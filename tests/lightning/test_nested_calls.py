"""A trainer call in a hook of another one, with the same callback: the outer call continues as before."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import FILE_NAME
from tests.support.models import FEATURES, Classifier, loader, seeded, trainer
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.all_versions


class Tells(Classifier):
    """Notes of each step whether it ran compiled: a pass makes the outputs of ReLU negative."""

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
    """Calls ``validate`` in one hook of the first epoch, or of all of them.

    Args:
        ours: The callback that the inner trainer has, too.
        hook: The hook.
        module: The module to validate; by default the one that is trained.
        same_trainer: Whether the trainer that trains also validates, which Lightning supports at the end of a fit.
        settings: Of the inner trainer.
    """

    def __init__(self, ours, hook="on_train_epoch_end", *, module=None, same_trainer=False, **settings):
        self.ours, self.module, self.same_trainer, self.settings = ours, module, same_trainer, settings
        setattr(self, hook, self.validate)

    def validate(self, outer, pl_module, *args):
        inner = outer if self.same_trainer else trainer(self.ours, **self.settings)
        state = copy.copy(vars(outer.state))
        try:
            inner.validate(self.module or pl_module, loader(2), verbose=False)
        finally:
            vars(outer.state).update(state)
            pl_module.trainer = outer
            pl_module.train()


def compiler():
    return InductorCompile(
        targets=["net"], passes=[WrongForward("train"), WrongForward("infer")], baseline_steps=0, verify="off"
    )


def fit(*callbacks, module=None, **settings):
    module = module or seeded(Tells)
    trainer(*callbacks, max_epochs=2, num_sanity_val_steps=0, **settings).fit(module, loader(3), loader(1))
    return module


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_batch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_fit_stays_compiled_after_a_validation_in_a_hook(hook, ours_first):
    ours = compiler()
    inner = Validates(ours, hook)
    module = fit(*((ours, inner) if ours_first else (inner, ours)))
    assert module.train_compiled == [True] * 6
    assert len(module.validation_compiled) > 2
    assert all(module.validation_compiled)
    assert (ours.report.train.graphs, ours.report.infer.graphs) == (1, 2)  # no_grad, and inference_mode
    assert not module._load_state_dict_pre_hooks
    assert "_compiled_call_impl" not in vars(module.net)


def test_fit_stays_compiled_after_a_validation_in_a_step():
    class InStep(Tells):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                Validates(ours).validate(self.trainer, self)
            return super().training_step(batch, batch_idx)

    ours = compiler()
    assert fit(ours, module=seeded(InStep)).train_compiled == [True] * 6


def test_another_module_is_validated_compiled_and_then_the_fit_goes_on():
    ours, other = compiler(), seeded(Tells)
    module = fit(ours, Validates(ours, module=other))
    assert module.train_compiled == [True] * 6
    assert other.validation_compiled == [True] * 4
    assert "_compiled_call_impl" not in vars(module.net) | vars(other.net)
    assert (ours.report.train.graphs, ours.report.infer.graphs) == (1, 1)


def test_each_call_writes_its_report_into_its_own_folder(tmp_path):
    ours = compiler()
    fit(ours, Validates(ours, default_root_dir=tmp_path / "inner"), default_root_dir=tmp_path / "outer")
    for folder, calls in (("outer", ["fit"]), ("inner", ["validate", "validate"])):
        records = json.loads(Path(tmp_path, folder, FILE_NAME).read_text())
        assert [record["call"] for record in records] == calls


def test_a_fit_whose_trainer_validates_at_its_end_writes_its_report(tmp_path):
    ours = compiler()
    module = fit(ours, Validates(ours, "on_train_end", same_trainer=True), default_root_dir=tmp_path)
    assert [record["call"] for record in json.loads(Path(tmp_path, FILE_NAME).read_text())] == ["validate", "fit"]
    assert all(module.validation_compiled)
    assert not module._load_state_dict_pre_hooks


def test_fit_stays_compiled_after_an_inner_call_that_raised():
    class Fails(Tells):
        def validation_step(self, batch, batch_idx):
            raise KeyError("by design")

    class Catches(Validates):
        def validate(self, *args):
            with pytest.raises(KeyError, match="by design"):
                super().validate(*args)

    ours = compiler()
    other = Fails()
    module = fit(ours, Catches(ours, module=other))
    assert module.train_compiled == [True] * 6
    assert not other._load_state_dict_pre_hooks


def test_a_fit_whose_end_was_never_announced_does_not_count_as_outer():
    class RaisesToo(pl.Callback):
        def on_exception(self, *args):
            raise ValueError("in on_exception")

    class Fails(Tells):
        def training_step(self, batch, batch_idx):
            raise KeyError("by design")

    ours = compiler()
    with pytest.raises(ValueError, match="in on_exception"):
        fit(RaisesToo(), ours, module=Fails())
    module = fit(ours)
    assert module.train_compiled == [True] * 6
    assert "_compiled_call_impl" not in vars(module.net)
