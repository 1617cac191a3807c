"""When the report claims a speedup."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.step_stats import speedup_interval
from compile_callbacks.profiling.step_timer import StepTimes
from compile_callbacks.report.build import compare
from tests.support.models import Classifier, loader, trainer
from tests.support.step_times import Times

pytestmark = pytest.mark.usefixtures("no_codegen")


def noisy(median, count=20, spread=0.1):
    draw = random.Random(median)
    return tuple(median * (1 + draw.uniform(-spread, spread)) for _ in range(count))


@pytest.mark.parametrize(
    ("eager", "compiled", "verdict"),
    [
        ((), (), None),
        ((4.0,) * 9, (), None),
        ((), (4.0,) * 9, "too few samples"),
        ((4.0,) * 4, (2.0,) * 9, "too few samples"),
        ((4.0,) * 9, (2.0,) * 4, "too few samples"),
        ((1045.0, 9.0), (5.0, 5.0), "too few samples"),  # a garbage collection in one of two eager samples
        ((4.0,) * 5, (2.0,) * 5, "faster"),
        ((2.0,) * 5, (4.0,) * 5, "slower"),
        ((4.0,) * 5, (4.0,) * 5, "no difference"),
        (noisy(10.0), noisy(10.05), "no difference"),
        (noisy(10.0), noisy(5.0), "faster"),
        ((9.0, 9.1, 9.2, 9.1, 1045.0), (10.0, 9.0, 9.2, 9.1, 9.3), "no difference"),
    ],
)
def test_speedup_needs_samples_and_an_interval_without_one(eager, compiled, verdict):
    assert compare(StepTimes(eager, compiled)) == verdict


def test_interval_draws_from_no_global_generator():
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert speedup_interval(noisy(10.0), noisy(8.0)) == speedup_interval(noisy(10.0), noisy(8.0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def fitted(baseline_steps, monkeypatch, eager, compiled):
    Times(monkeypatch, train={"eager": eager, None: compiled})
    callback = InductorCompile("default", None, baseline_steps=baseline_steps, verify="off")
    trainer(callback).fit(Classifier(), loader(20))
    return callback.report


def test_a_run_with_enough_samples_reports_a_speedup(monkeypatch):
    report = fitted(5, monkeypatch, 10, 5)
    assert (report.train.speedup, report.train.samples) == (2.0, 5)
    assert report.train.verdict in ("faster", "compile time not repaid")
    assert report.scalars()["step/train/speedup"] == 2.0
    assert "2.00x" in str(report)


@pytest.mark.parametrize(
    ("baseline_steps", "compiled", "reason"),
    [(2, 5, "too few samples"), (5, 10, "no difference"), (0, 5, "too few samples")],
)
def test_a_run_without_evidence_reports_why(baseline_steps, compiled, reason, monkeypatch):
    report = fitted(baseline_steps, monkeypatch, 10, compiled)
    train = report.train
    assert (train.speedup, train.break_even_steps) == (None, None)
    assert (train.net_seconds_saved is None) == (baseline_steps < 5)
    assert train.verdict == reason
    assert train.compiled_step_ms == compiled
    assert not {"step/train/speedup", "step/train/break_even_steps"} & report.scalars().keys()
    assert reason in str(report)
