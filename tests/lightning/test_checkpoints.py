"""Checkpoints: the keys of the eager module, keys with ``_orig_mod.``, no entry of the callback, and resumed runs."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from compile_callbacks import CompileWarning, InductorCompile
from tests.cases.case import attributes
from tests.support.models import FLOAT32, Classifier, assert_fits_as_eager, fit, loader, mlp, seeded, trainer
from tests.support.passes import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def by_hand():
    return Classifier(torch.compile(mlp()))


class CompilesItself(Classifier):
    """Compiles its child in ``__init__``, with or without a wrapper."""

    wraps = True

    def __init__(self):
        super().__init__(torch.compile(mlp()) if self.wraps else None)
        if not self.wraps:
            self.net.compile()


def test_a_fit_whose_checkpoints_load_from_checkpoint_cannot_load_warns(tmp_path, monkeypatch):
    def run(*others, **settings):
        return fit(InductorCompile(baseline_steps=0), *others, make=CompilesItself, **settings)

    run()  # without checkpoints, it does not warn
    saved = ModelCheckpoint(dirpath=tmp_path)
    message = r"If CompilesItself.__init__ calls torch.compile for net, CompilesItself.load_from_checkpoint will fail"
    with pytest.warns(CompileWarning, match=message):
        run(saved, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="_orig_mod"):
        CompilesItself.load_from_checkpoint(saved.best_model_path)
    trainer(InductorCompile()).validate(CompilesItself(), loader(2), ckpt_path=saved.best_model_path, verbose=False)
    monkeypatch.setattr(CompilesItself, "wraps", False)  # the first advice keeps the keys
    saved = ModelCheckpoint(dirpath=tmp_path / "in_place")
    module = run(saved, enable_checkpointing=True)
    loaded = CompilesItself.load_from_checkpoint(saved.best_model_path)
    torch.testing.assert_close(loaded.state_dict(), module.state_dict())


@pytest.mark.filterwarnings("ignore:the checkpoints of this fit have no '_orig_mod.' in their keys")
@pytest.mark.parametrize("make", [Classifier, by_hand])
def test_checkpoints_have_the_keys_of_the_eager_module_and_no_entry_of_the_callback(make, tmp_path):
    """So they load in a process without this library."""
    keys, module, seen = set(Classifier().state_dict()), make(), []
    saved = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    module.on_train_epoch_end = lambda: seen.append(set(module.state_dict()))
    fit(InductorCompile(baseline_steps=0), saved, make=lambda: module, enable_checkpointing=True)
    module.trainer.save_checkpoint(tmp_path / "by_trainer.ckpt")
    assert [*seen, set(module.state_dict())] == [keys, keys]
    for path in (saved.best_model_path, saved.last_model_path, tmp_path / "by_trainer.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        assert set(checkpoint["state_dict"]) == keys
        assert not any("InductorCompile" in key for key in checkpoint["callbacks"])


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


class Interrupts(Uncached):
    """Stands for Ctrl-C while something compiles."""

    def __call__(self, graph, is_inference):
        raise KeyboardInterrupt


class InterruptedStep(Classifier):
    def training_step(self, batch, batch_idx):
        raise KeyboardInterrupt


def test_ctrl_c_while_something_compiles_ends_the_run_as_in_any_other_step(tmp_path):
    def interrupted(folder, make, *ours):
        with pytest.raises(BaseException) as raised:  # noqa: PT011
            fit(*ours, OnExceptionCheckpoint(folder), make=make, validation=None, enable_checkpointing=True)
        saved = torch.load(folder / "on_exception.ckpt", weights_only=False)
        return raised.type, [saved[part] for part in ("global_step", "state_dict", "optimizer_states")]

    ours = InductorCompile("default", None, passes=[Interrupts()], targets=["net"], baseline_steps=0)
    kind, saved = interrupted(tmp_path / "ours", Classifier, ours)
    expected_kind, expected = interrupted(tmp_path / "eager", InterruptedStep)
    assert kind is expected_kind
    assert ours.report.train.graphs == 0
    torch.testing.assert_close(saved, expected)


class FailsInTheSixthStep(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(None if batch_idx == 5 else batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:.*was called without a model",
    "ignore:.*there is no last checkpoint available",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
def test_a_checkpoint_on_exception_equals_eager_and_resumes(tmp_path):
    def fail(folder, *ours):
        module = seeded(FailsInTheSixthStep)
        with pytest.raises(TypeError, match="cannot unpack"):
            trainer(*ours, OnExceptionCheckpoint(folder), enable_checkpointing=True).fit(module, loader(), loader(2))
        saved = torch.load(folder / "on_exception.ckpt", weights_only=False)
        assert [attributes(part) for part in module.modules()] == [attributes(part) for part in eager.modules()]
        return module.losses, [saved[part] for part in ("global_step", "state_dict", "optimizer_states")]

    ours, eager = InductorCompile(baseline_steps=0), seeded(FailsInTheSixthStep)
    with pytest.raises(TypeError, match="cannot unpack"):
        trainer().fit(eager, loader())
    expected, saved = fail(tmp_path / "eager"), fail(tmp_path / "ours", ours)
    assert (ours.report.train.graphs, saved[1][0]) == (1, 5)
    torch.testing.assert_close(saved, expected, **FLOAT32)
    assert_fits_as_eager(ours, max_epochs=2, ckpt_path=tmp_path / "ours" / "on_exception.ckpt")
