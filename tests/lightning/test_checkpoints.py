"""Checkpoints: the keys of the eager module, keys with ``_orig_mod.``, and no entry of the callback."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import Classifier, fit, loader, mlp, trainer
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def by_hand():
    return Classifier(torch.compile(mlp()))


class CompilesItself(Classifier):
    """Compiles its child in ``__init__``, with or without a wrapper."""

    wraps = True

    def __init__(self):
        super().__init__()
        if self.wraps:
            self.net = torch.compile(self.net)
        else:
            self.net.compile()


def test_a_fit_whose_checkpoints_load_from_checkpoint_cannot_load_warns(tmp_path, monkeypatch):
    message = r"If CompilesItself.__init__ calls torch.compile for net, CompilesItself.load_from_checkpoint will fail"
    saved = ModelCheckpoint(dirpath=tmp_path)
    with pytest.warns(CompileWarning, match=message):
        fit(InductorCompile(baseline_steps=0), saved, make=CompilesItself, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="_orig_mod"):
        CompilesItself.load_from_checkpoint(saved.best_model_path)
    trainer(InductorCompile()).validate(CompilesItself(), loader(2), ckpt_path=saved.best_model_path, verbose=False)
    monkeypatch.setattr(CompilesItself, "wraps", False)  # the first advice keeps the keys
    saved = ModelCheckpoint(dirpath=tmp_path / "in_place")
    module = fit(InductorCompile(baseline_steps=0), saved, make=CompilesItself, enable_checkpointing=True)
    loaded = CompilesItself.load_from_checkpoint(saved.best_model_path)
    torch.testing.assert_close(loaded.state_dict(), module.state_dict())


def test_a_fit_without_checkpoints_does_not_warn_of_a_wrapper():
    fit(InductorCompile(baseline_steps=0), make=CompilesItself)


@pytest.mark.filterwarnings("ignore:the checkpoints of this fit have no '_orig_mod.' in their keys")
@pytest.mark.parametrize("make", [Classifier, by_hand])
def test_checkpoints_have_the_keys_of_the_eager_module(make, tmp_path):
    keys = set(Classifier().state_dict())
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module, seen = make(), []
    module.on_train_epoch_end = lambda: seen.append(set(module.state_dict()))
    fit(InductorCompile(baseline_steps=0), saved, make=lambda: module, enable_checkpointing=True)
    module.trainer.save_checkpoint(tmp_path / "by_trainer.ckpt")
    assert seen == [keys]
    assert set(module.state_dict()) == keys
    for path in (saved.best_model_path, saved.last_model_path, tmp_path / "by_trainer.ckpt"):
        assert set(torch.load(path, weights_only=False)["state_dict"]) == keys


@pytest.mark.slow
def test_a_checkpoint_loads_in_a_process_without_this_library(tmp_path):
    fit(InductorCompile(baseline_steps=0)).trainer.save_checkpoint(tmp_path / "run.ckpt")
    source = f"""
import sys
sys.modules["compile_callbacks"] = None
from tests.support.models import Classifier
print("loaded", len(Classifier.load_from_checkpoint({str(tmp_path / "run.ckpt")!r}, weights_only=True).state_dict()))
"""
    assert f"loaded {len(Classifier().state_dict())}" in run_in_new_process(source)


def test_a_checkpoint_of_a_module_that_was_compiled_by_hand_loads(tmp_path):
    module = fit(make=by_hand)
    module.trainer.save_checkpoint(tmp_path / "old.ckpt")
    weights = {key.replace("_orig_mod.", ""): value for key, value in module.state_dict().items()}
    assert weights.keys() != module.state_dict().keys()

    resumed = fit(InductorCompile(), train=0, max_epochs=2, ckpt_path=tmp_path / "old.ckpt")
    torch.testing.assert_close(dict(resumed.state_dict()), weights)


def test_a_key_that_does_not_fit_is_still_an_error():
    module, ours, run = Classifier(), InductorCompile(), trainer()
    ours.setup(run, module, "fit")
    with pytest.raises(RuntimeError, match=r"net\.9\.weight"):
        module.load_state_dict({**module.state_dict(), "_orig_mod.net.9.weight": torch.ones(1)})
    ours.on_exception(run, module, RuntimeError())
    with pytest.raises(RuntimeError, match="_orig_mod"):
        module.load_state_dict({f"_orig_mod.{key}": value for key, value in module.state_dict().items()})


def test_a_checkpoint_has_no_entry_of_the_callback_and_the_entry_of_an_older_version_is_ignored(tmp_path):
    fit(InductorCompile(baseline_steps=0), train=4).trainer.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert [key for key in checkpoint["callbacks"] if "InductorCompile" in key] == []
    checkpoint["callbacks"]["InductorCompile"] = {"version": 1, "report": {}, "shapes": {}, "winners": {}}
    torch.save(checkpoint, tmp_path / "older.ckpt")
    ours = InductorCompile(baseline_steps=5)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*callbacks used to create the checkpoint")
        fit(ours, train=20, max_epochs=2, ckpt_path=tmp_path / "older.ckpt")
    assert (ours.report.train.graphs, ours.report.train.diagnostics.eager_samples) == (1, 5)


def test_the_report_of_a_copy_that_ran_is_that_of_the_original():
    ours = InductorCompile(baseline_steps=0)
    twin = copy.deepcopy(ours)
    fit(twin)
    assert ours.report == twin.report
    assert ours.report.train.graphs == 1
