"""Models of other packages train as without the callback: with a baseline, and compiled from the first step on."""

from __future__ import annotations

import cv2  # noqa: F401  anomalib imports it, and it sets environment variables
import lightning.pytorch as pl
import pytest

from compile_callbacks import InductorCompile
from compile_callbacks.testing import assert_same_training
from tests.models import loops, test_forecasting, texts, vision
from tests.support.models import QUIET

TRIALS = [trial for module in (test_forecasting, loops, texts, vision) for trial in module.TRIALS]


def train(trial, callback, **settings):
    """Train with the callback and without it, compare the runs, and return the report of the train phase."""

    def data():
        if trial.validate is None:
            return trial.train()
        module = pl.LightningDataModule()
        module.train_dataloader, module.val_dataloader = trial.train, trial.validate
        return module

    kwargs = {**QUIET, "max_epochs": None, "limit_val_batches": 2, **trial.settings}
    assert_same_training(
        trial.make, data, callback=callback, trainer_kwargs=kwargs, tolerance=trial.tolerance, **settings
    )
    return callback.report.train


@pytest.mark.parametrize("baseline_steps", [0, 5])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_model_trains_as_it_does_without_the_callback(trial, baseline_steps):
    callback = InductorCompile(**{"baseline_steps": baseline_steps, **trial.arguments})
    found = train(trial, callback, steps=16)
    assert (found.fallbacks, callback.report.infer.fallbacks) == (0, 0)
    for phase in (found, callback.report.infer):
        assert phase.verified is None or "differs" not in phase.verified
        assert phase.graph_breaks or phase.recompiles <= 2, phase
    assert found.graphs, found


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_auto_makes_no_model_wrong_or_slower(trial, monkeypatch):
    """ "auto" tries its candidates here even if the run is too short to repay their compile time."""
    monkeypatch.setattr("compile_callbacks.tuning.contest.why_not_compiled", lambda *args: "")
    found = train(trial, InductorCompile("auto", None), steps=200, allow_cannot_tell=True)
    verdicts = {each["candidate"]: each["verdict"] for each in found.diagnostics.trials}
    assert "chosen" in verdicts.values(), f"the run is too short for a choice: {found.diagnostics.trials}"
    assert set(verdicts) - {"eager"}
    assert found.verdict != "slower", found
