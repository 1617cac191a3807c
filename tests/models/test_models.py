"""Models of other packages train as without the callback: with a baseline, and compiled from the first step on."""

from __future__ import annotations

import dataclasses
import functools

import cv2  # noqa: F401  anomalib imports it, and it sets environment variables
import lightning.pytorch as pl
import pytest
import torch
import torch._inductor.config

from compile_callbacks import InductorCompile
from compile_callbacks.testing import assert_same_training
from compile_callbacks.tuning import rule
from tests.models import loops, test_forecasting, texts, vision
from tests.models.trial import BASELINE_STEPS, assert_trains_as_eager, run
from tests.support.models import QUIET

EPOCHS = 12  # enough steps for all candidates of "auto"
TRIALS = [trial for module in (test_forecasting, loops, texts, vision) for trial in module.TRIALS]


def data_of(trial):
    if trial.validate is None:
        return trial.train()
    data = pl.LightningDataModule()
    data.train_dataloader, data.val_dataloader = trial.train, trial.validate
    return data


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_model_with_a_baseline_equals_eager(trial):
    settings = {"eager_targets": trial.eager_targets, "chaotic": trial.chaotic}
    assert_trains_as_eager(functools.partial(run, trial), trial.close, **settings, **trial.arguments)


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_a_model_trains_as_it_does_without_the_callback(trial):
    """A target whose gradients a step differentiates stays eager only after a baseline."""
    baseline = BASELINE_STEPS if trial.eager_targets else 0
    result = assert_same_training(
        trial.make,
        lambda: data_of(trial),
        steps=12,
        callback=InductorCompile(**{"baseline_steps": baseline, **trial.arguments}),
        trainer_kwargs={**QUIET, "max_epochs": None, "limit_val_batches": 2, **trial.settings},
        tolerance=trial.close["rtol"],
        allow_cannot_tell=trial.chaotic,
    )
    assert result == "same" or trial.chaotic


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: trial.name)
def test_auto_makes_no_model_wrong_or_slower(trial, monkeypatch):
    """ "auto" tries its candidates here even if the run is too short to repay their compile time.

    The losses of the first two epochs are compared, because training amplifies rounding. Compiled code draws the random
    numbers of eager code, because samplers of detectors draw some.
    """
    monkeypatch.setattr(rule, "why_not_compiled", lambda *args, **settings: "")
    longer = {**trial.settings, "max_epochs": EPOCHS, "num_sanity_val_steps": 0}
    trial = dataclasses.replace(trial, settings=longer, after=None)
    eager, callback = run(trial), InductorCompile("auto", None)
    with torch._inductor.config.patch(fallback_random=True):
        tuned = run(trial, callback)
    report = callback.report.train
    verdicts = {each["candidate"]: each["verdict"] for each in report.diagnostics.trials}
    assert "chosen" in verdicts.values(), f"the run is too short for a choice: {report.diagnostics.trials}"
    assert set(verdicts) - {"eager"}
    assert report.verdict != "slower", report
    assert len(eager.losses) == len(tuned.losses)
    if not trial.chaotic:
        first = 2 * len(eager.losses) // EPOCHS
        torch.testing.assert_close(tuned.losses[:first], eager.losses[:first], **trial.close)
