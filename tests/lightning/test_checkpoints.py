"""Checkpoints look as if nothing had been compiled, and old ones load."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from compile_callbacks import InductorCompile
from tests.support.models import Classifier, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process

pytestmark = pytest.mark.usefixtures("no_codegen")


def fit(module, tmp_path, *callbacks, **kwargs):
    fitted = trainer(
        InductorCompile(baseline_steps=0),
        *callbacks,
        default_root_dir=tmp_path,
        enable_checkpointing=True,
        **kwargs,
    )
    fitted.fit(module, loader(4), loader(2))
    return fitted


@pytest.mark.parametrize("make", [Classifier, lambda: Classifier(torch.compile(mlp()))], ids=["plain", "by-hand"])
def test_keys_equal_the_eager_models_however_they_are_saved(make, tmp_path):
    keys = set(Classifier().state_dict())
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module = make()
    seen = []
    module.on_train_epoch_end = lambda: seen.append(set(module.state_dict()))
    fitted = fit(module, tmp_path, saved)
    fitted.save_checkpoint(tmp_path / "by_trainer.ckpt")
    torch.save(module.state_dict(), tmp_path / "by_torch.pt")
    assert seen == [keys]
    for path in (saved.best_model_path, saved.last_model_path, tmp_path / "by_trainer.ckpt"):
        assert set(torch.load(path, weights_only=False)["state_dict"]) == keys
    assert set(torch.load(tmp_path / "by_torch.pt")) == keys


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


def test_checkpoints_of_earlier_torch_compile_days_load(tmp_path):
    by_hand = seeded(lambda: Classifier(torch.compile(mlp())))
    plain = trainer(enable_checkpointing=True, default_root_dir=tmp_path)
    plain.fit(by_hand, loader(2))
    plain.save_checkpoint(tmp_path / "old.ckpt")
    weights = {k.replace("_orig_mod.", ""): v for k, v in by_hand.state_dict().items()}
    assert any("_orig_mod." in key for key in by_hand.state_dict())

    module = Classifier()
    trainer(InductorCompile(), max_epochs=2).fit(module, loader(0), ckpt_path=tmp_path / "old.ckpt")
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, weights[key])


def test_clean_checkpoints_load_where_a_child_is_compiled_by_hand(tmp_path):
    fit(seeded(), tmp_path).save_checkpoint(tmp_path / "clean.ckpt")
    module = Classifier(torch.compile(mlp()))
    tested = trainer(InductorCompile(baseline_steps=0))
    assert tested.test(module, loader(2), ckpt_path=tmp_path / "clean.ckpt", verbose=False)


def test_a_key_that_truly_does_not_fit_is_still_an_error(tmp_path):
    module = Classifier()
    checked = InductorCompile()
    run = trainer()
    checked.setup(run, module, "fit")
    with pytest.raises(RuntimeError, match=r"net\.9\.weight"):
        module.load_state_dict({**module.state_dict(), "_orig_mod.net.9.weight": torch.ones(1)})
    checked.on_exception(run, module, RuntimeError())
    with pytest.raises(RuntimeError, match="_orig_mod"):
        module.load_state_dict({f"_orig_mod.{k}": v for k, v in module.state_dict().items()})


def test_outputs_after_load_from_checkpoint_equal_the_compiled_ones(tmp_path):
    module = seeded()
    fitted = fit(module, tmp_path)
    fitted.save_checkpoint(tmp_path / "run.ckpt")
    compiled = torch.cat(trainer(InductorCompile(baseline_steps=0)).predict(module, loader(3)))
    loaded = Classifier.load_from_checkpoint(tmp_path / "run.ckpt", weights_only=False)
    torch.testing.assert_close(torch.cat(trainer().predict(loaded, loader(3))), compiled, rtol=1e-4, atol=1e-6)
