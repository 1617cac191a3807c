"""Baselines, step times and scalars: what is a sample, and what loggers get."""

from __future__ import annotations

import csv
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.report.report import PhaseReport
from tests.support.models import Classifier, loader, trainer
from tests.support.step_times import TimedSteps, Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

NAMES = {"seconds", "graphs", "graph_breaks", "recompiles", "cache_hits"}
SCALARS = {f"compile/{p}/{n}" for p in ("train", "infer") for n in NAMES} | {
    f"step/{p}/{n}" for p in ("train", "infer") for n in ("eager_ms", "compiled_ms", "speedup")
}


def test_warm_up_and_disturbed_steps_are_no_samples():
    steps = TimedSteps()
    assert WARMUP_STEPS == 2
    assert steps.run([90, 80, 10, 12], compiled=False) == [False, False, True, True]
    assert steps.run([900], compiled=True, disturbed=True) == [False]
    assert steps.run([70, 60, 4, 6], compiled=True) == [False, False, True, True]
    assert steps.run([500], compiled=True, disturbed=True) == [False]
    assert steps.run([50, 40, 5], compiled=True) == [False, False, True]
    times = steps.timer.times("train")
    assert times.eager_ms == pytest.approx((10, 12))
    assert times.compiled_ms == pytest.approx((4, 6, 5))
    assert steps.timer.times("infer").compiled_ms == ()


def test_settings_of_a_phase_have_samples_of_their_own_and_lose_one_at_each_turn():
    steps = TimedSteps()
    timer = steps.timer
    for candidate, milliseconds, samples in [("a", [9, 9, 4], 1), ("b", [9, 9, 5], 1), ("a", [9, 4, 4], 2)]:
        timer.restart_warmup("train", compiled=True, candidate=candidate)
        assert sum(steps.run(milliseconds, compiled=True, candidate=candidate)) == samples
    assert timer.times("train", "a").compiled_ms == pytest.approx((4, 4, 4))
    assert timer.times("train", "b").compiled_ms == pytest.approx((5,))
    assert timer.times("train").compiled_ms == ()
    assert (timer.compiled_steps("train", "a"), timer.compiled_steps("train", "b")) == (6, 3)


def test_baseline_goes_on_over_stage_runs():
    callback = InductorCompile(baseline_steps=4)
    trainer(callback, max_epochs=6, num_sanity_val_steps=0).fit(Classifier(), loader(4), loader(3))
    assert callback.report.infer.samples == 4


def test_what_was_not_measured_is_none():
    callback = InductorCompile(baseline_steps=0)
    assert callback.report.train == PhaseReport(mode="default")
    trainer(callback).fit(Classifier(), loader(6))
    report = callback.report
    assert report.train.eager_step_ms is None
    assert report.train.speedup is None
    assert report.train.break_even_steps is None
    assert report.train.compiled_step_ms > 0
    assert report.train.samples == 6 - 2 - WARMUP_STEPS  # the first step is eager, the second one compiles
    assert report.infer.compile_seconds is None
    assert report.infer.samples is None
    assert not {name for name in report.scalars() if "speedup" in name or "infer" in name}


def test_a_run_too_short_for_a_baseline_is_compiled_from_its_first_step():
    callback = InductorCompile(baseline_steps=10)
    trainer(callback).fit(Classifier(), loader(4), loader(2))
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
    assert callback.report.train.speedup is None


def test_sanity_check_is_eager_and_not_measured():
    callback = InductorCompile("eager", targets=["forward"], baseline_steps=2)
    after = pl.Callback()
    after.on_sanity_check_end = lambda *args: vars(after).update(graphs=callback.report.infer.graphs)
    trainer(callback, after, max_epochs=1, limit_val_batches=2).fit(Classifier(), loader(2), loader(2))
    assert after.graphs == 0
    assert callback.report.infer.graphs == 1
    assert callback.report.infer.samples is None


def test_the_same_scalars_reach_tensorboard_and_csv(tmp_path, monkeypatch):
    Times(monkeypatch, train={"eager": 10, None: 5}, infer={"eager": 10, None: 5})
    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")]
    callback = InductorCompile(baseline_steps=5)
    trainer(callback, logger=loggers, max_epochs=2).fit(Classifier(), loader(12), loader(8))

    events = EventAccumulator(loggers[0].log_dir)
    events.Reload()
    with Path(loggers[1].log_dir, "metrics.csv").open() as file:
        columns = set(next(csv.reader(file)))
    assert set(events.Tags()["scalars"]) >= SCALARS
    assert columns >= SCALARS
    speedup = events.Scalars("step/train/speedup")[-1].value
    assert speedup == pytest.approx(callback.report.train.speedup, rel=1e-5)
    assert events.Scalars("compile/train/seconds")[-1].value == pytest.approx(callback.report.train.compile_seconds)
