"""`AOTInductorExport` of a resumed run loads the best file that the checkpoint names without running code."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from compile_callbacks import AOTInductorExport, CompileWarning, export, load_exported
from tests.support.export_runs import expected, fit
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
X = torch.linspace(-1, 1, 3 * FEATURES).reshape(3, FEATURES)


pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch):
    """Export the programs of torch.export, which need no C++ compiler."""
    monkeypatch.setattr("compile_callbacks.callbacks.aot_export.export", functools.partial(export, format="export"))


class Hyperparameter:
    """Its class is one that ``weights_only=True`` refuses."""


class Aging(Classifier):
    """Its first epoch is its best."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"user": Hyperparameter()})

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("age", float(self.current_epoch))


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


def checkpointing(folder: Path, best: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="age", mode="min", save_top_k=best, save_last=True)


def weights() -> dict[str, torch.Tensor]:
    """Return weights for a `Classifier`, different from those of the run."""
    torch.manual_seed(7)
    return Classifier(mlp()).state_dict()


def resume(folder: Path, export_to: Path, change, *, best: int = 1) -> tuple[AOTInductorExport, Aging]:
    """Train one epoch, edit the callback state in the checkpoint with ``change``, and resume from the checkpoint."""
    checkpoint = checkpointing(folder)
    fit(checkpoint, make=Aging, max_epochs=1, enable_checkpointing=True)
    state = torch.load(checkpoint.last_model_path, weights_only=False)
    (of_checkpoint,) = [value for name, value in state["callbacks"].items() if name.startswith("ModelCheckpoint")]
    change(of_checkpoint)
    state["hyper_parameters"] = {}
    torch.save(state, folder / "resumed.ckpt")
    callback, module = AOTInductorExport(export_to), seeded(Aging)
    settings = {"max_epochs": 2, "enable_checkpointing": True}
    trainer(callback, checkpointing(folder, best), **settings).fit(
        module, loader(), loader(2, seed=2), ckpt_path=folder / "resumed.ckpt"
    )
    return callback, module


def assert_exports(callback: AOTInductorExport, module: Classifier) -> None:
    torch.testing.assert_close(load_exported(callback.path)(X), expected(module, X), **CLOSE)


def as_best(path: Path):
    return lambda state: state.update(best_model_path=str(path), best_model_score=torch.tensor(-1e9))


def among_best(path: Path):
    """Named as one of several: it becomes the best one when the next checkpoint is compared with the file."""
    return lambda state: state.update(best_k_models={str(path): torch.tensor(-1e9)}, kth_best_model_path=str(path))


@pytest.mark.parametrize(("named", "best"), [(as_best, 1), (among_best, 2)])
def test_a_planted_best_checkpoint_is_not_unpickled(named, best, tmp_path):
    planted, ran = tmp_path / "planted.ckpt", tmp_path / "ran"
    torch.save({"state_dict": weights(), "payload": Payload(ran)}, planted)
    with pytest.warns(CompileWarning, match=r"net\.pt2 gets the last weights: .*planted\.ckpt, which the resumed"):
        callback, module = resume(tmp_path / "run", tmp_path / "net.pt2", named(planted), best=best)
    assert not ran.exists()
    assert (callback.report.weights, callback.report.error) == ("last", None)
    assert_exports(callback, module)


def test_the_best_checkpoint_of_a_resumed_run_is_exported_if_it_has_only_weights(tmp_path):
    best = tmp_path / "best.ckpt"
    torch.save({"state_dict": weights(), "hyper_parameters": {"rate": 0.1}}, best)
    callback, _ = resume(tmp_path / "run", tmp_path / "net.pt2", as_best(best))
    assert (callback.report.weights, callback.report.checkpoint) == ("best", str(best))
    module = Classifier()
    module.load_state_dict(weights())
    assert_exports(callback, module)


def test_a_best_checkpoint_of_this_process_is_exported_with_hyperparameters_of_any_class(tmp_path):
    callback, checkpoint = AOTInductorExport(tmp_path / "net.pt2"), checkpointing(tmp_path)
    made = trainer(callback, checkpoint, max_epochs=2, enable_checkpointing=True)
    module = seeded(Aging)
    made.fit(module, loader(), loader(2, seed=2))
    assert callback.report.weights == "best"
    made.fit_loop.max_epochs = 3
    made.fit(module, loader(), loader(2, seed=2))  # its best checkpoint is still that of the first fit
    assert (callback.report.weights, callback.report.checkpoint) == ("best", checkpoint.best_model_path)
    best = Aging()
    best.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"])
    assert_exports(callback, best)
