"""Checkpoints have the keys of the eager module, and those with ``_orig_mod.`` load."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from compile_callbacks import InductorCompile
from tests.support.models import Classifier, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process

pytestmark = pytest.mark.usefixtures("no_codegen")


def fit(module, tmp_path, *callbacks):
    callbacks = (InductorCompile(baseline_steps=0), *callbacks)
    fitted = trainer(*callbacks, default_root_dir=tmp_path, enable_checkpointing=True)
    fitted.fit(module, loader(4), loader(2))
    return fitted


def by_hand():
    return Classifier(torch.compile(mlp()))


@pytest.mark.parametrize("make", [Classifier, by_hand])
def test_checkpoints_have_the_keys_of_the_eager_module(make, tmp_path):
    keys = set(Classifier().state_dict())
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module, seen = make(), []
    module.on_train_epoch_end = lambda: seen.append(set(module.state_dict()))
    fitted = fit(module, tmp_path, saved)
    fitted.save_checkpoint(tmp_path / "by_trainer.ckpt")
    assert seen == [keys]
    assert set(module.state_dict()) == keys
    for path in (saved.best_model_path, saved.last_model_path, tmp_path / "by_trainer.ckpt"):
        assert set(torch.load(path, weights_only=False)["state_dict"]) == keys


@pytest.mark.slow
def test_a_checkpoint_loads_in_a_process_without_this_library(tmp_path):
    fit(seeded(), tmp_path).save_checkpoint(tmp_path / "run.ckpt")
    source = f"""
import sys
sys.modules["compile_callbacks"] = None
from tests.support.models import Classifier
print("loaded", len(Classifier.load_from_checkpoint({str(tmp_path / "run.ckpt")!r}, weights_only=True).state_dict()))
"""
    assert f"loaded {len(Classifier().state_dict())}" in run_in_new_process(source)


def test_a_checkpoint_of_a_module_that_was_compiled_by_hand_loads(tmp_path):
    module = seeded(by_hand)
    plain = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    plain.fit(module, loader(2))
    plain.save_checkpoint(tmp_path / "old.ckpt")
    weights = {key.replace("_orig_mod.", ""): value for key, value in module.state_dict().items()}
    assert weights.keys() != module.state_dict().keys()

    resumed = Classifier()
    trainer(InductorCompile(), max_epochs=2).fit(resumed, loader(0), ckpt_path=tmp_path / "old.ckpt")
    torch.testing.assert_close(dict(resumed.state_dict()), weights)


def test_a_key_that_does_not_fit_is_still_an_error():
    module, ours, run = Classifier(), InductorCompile(), trainer()
    ours.setup(run, module, "fit")
    with pytest.raises(RuntimeError, match=r"net\.9\.weight"):
        module.load_state_dict({**module.state_dict(), "_orig_mod.net.9.weight": torch.ones(1)})
    ours.on_exception(run, module, RuntimeError())
    with pytest.raises(RuntimeError, match="_orig_mod"):
        module.load_state_dict({f"_orig_mod.{key}": value for key, value in module.state_dict().items()})
