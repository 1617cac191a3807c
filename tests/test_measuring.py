"""Baselines, step times and scalars: what is a sample, and what loggers get."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from models import Classifier, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.measuring.baseline import Baseline
from compile_callbacks.measuring.timing import STEADY_STEPS, WARMUP_STEPS, StepTimer
from compile_callbacks.measuring.work import Work
from compile_callbacks.reporting.report import PhaseReport, break_even_steps

NAMES = {"seconds", "graphs", "graph_breaks", "recompiles", "cache_hits"}
SCALARS = {f"compile/{p}/{n}" for p in ("train", "infer") for n in NAMES} | {
    f"step/{p}/{n}" for p in ("train", "infer") for n in ("eager_ms", "compiled_ms", "speedup")
}


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def run_steps(timer, clock, milliseconds, *, compiled, work="w", disturbed=False, phase="train"):
    kept = []
    for step in milliseconds:
        timer.start(cuda=False)
        clock.now += step / 1000
        kept.append(timer.stop(phase, compiled=compiled, work=Work(work), disturbed=disturbed))
        clock.now += 5  # the data loader's time is nobody's
    return kept


def test_warm_up_and_disturbed_steps_are_no_samples():
    clock = FakeClock()
    timer = StepTimer(clock)
    assert WARMUP_STEPS == 2
    assert run_steps(timer, clock, [90, 80, 10, 12], compiled=False) == [False, False, True, True]
    assert run_steps(timer, clock, [900], compiled=True, disturbed=True) == [False]
    assert run_steps(timer, clock, [70, 60, 4, 6], compiled=True) == [False, False, True, True]
    assert run_steps(timer, clock, [500], compiled=True, disturbed=True) == [False]
    assert run_steps(timer, clock, [50, 40, 5], compiled=True) == [False, False, True]
    times = timer.times("train")
    assert times.eager_ms == pytest.approx((10, 12))
    assert times.compiled_ms == pytest.approx((4, 6, 5))
    assert timer.times("infer").compiled_ms == ()


def test_settings_of_a_phase_have_samples_of_their_own_and_lose_one_at_each_turn():
    clock = FakeClock()
    timer = StepTimer(clock)

    def steps(milliseconds, settings):
        timer.takes_turn("train", compiled=True, settings=settings)
        kept = []
        for step in milliseconds:
            timer.start(cuda=False)
            clock.now += step / 1000
            kept.append(timer.stop("train", compiled=True, work=Work("w"), disturbed=False, settings=settings))
        return kept

    assert steps([9, 9, 4], "a") == [False, False, True]
    assert steps([9, 9, 5], "b") == [False, False, True]
    assert steps([9, 4, 4], "a") == [False, True, True]
    assert timer.times("train", "a").compiled_ms == pytest.approx((4, 4, 4))
    assert timer.times("train", "b").compiled_ms == pytest.approx((5,))
    assert timer.times("train").compiled_ms == ()
    assert (timer.compiled_steps("train", "a"), timer.compiled_steps("train", "b")) == (6, 3)


class FakeEvent:
    """A CUDA event that is passed as soon as it is recorded."""

    clock: FakeClock
    recorded = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        type(self).recorded += 1
        self.at = self.clock.now

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1000


def test_of_steady_steps_on_a_gpu_an_eighth_is_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "recorded", 0)
    FakeEvent.clock = clock = FakeClock()
    timer = StepTimer(clock)

    def steps(number, *, wanted=False, disturbed=False, ms=4.0):
        before = FakeEvent.recorded
        for _ in range(number):
            timer.start(cuda=True, wanted=wanted)
            clock.now += ms / 1000
            timer.stop("train", compiled=True, work=Work("w"), disturbed=disturbed)
        return (FakeEvent.recorded - before) / 2

    assert steps(1, disturbed=True, ms=900) == 1
    assert steps(STEADY_STEPS) == STEADY_STEPS
    assert steps(800) == pytest.approx(100, rel=0.3)
    assert steps(50, wanted=True) == 50
    while steps(1, disturbed=True, ms=700):  # the host's clock sees it compile, timed or not
        steps(STEADY_STEPS)
    assert steps(STEADY_STEPS) == STEADY_STEPS
    assert timer.compiled_steps("train") >= STEADY_STEPS * 2 + 852
    series = {of["kind"]: of for of in timer.series("train")}
    assert series["compiling"]["ms"][0] == 900
    assert set(series["compiling"]["ms"][1:]) == {700}
    assert all(ms == pytest.approx(4) for ms in timer.times("train").compiled_ms)


def test_only_steps_of_equal_work_are_compared():
    clock = FakeClock()
    timer = StepTimer(clock)
    run_steps(timer, clock, [1, 1], compiled=False)
    run_steps(timer, clock, [10, 11, 12], compiled=False, work="full")
    run_steps(timer, clock, [3], compiled=False, work="ragged")
    run_steps(timer, clock, [1, 1], compiled=True)
    run_steps(timer, clock, [5, 6], compiled=True, work="full")
    run_steps(timer, clock, [2] * 9, compiled=True, work="odd")
    times = timer.times("train")
    assert times.eager_ms == pytest.approx((10, 11, 12))
    assert times.compiled_ms == pytest.approx((5, 6))


def test_without_shared_work_there_is_one_side_alone():
    clock = FakeClock()
    timer = StepTimer(clock)
    run_steps(timer, clock, [1, 1, 10], compiled=False, work="a")
    run_steps(timer, clock, [1, 1, 4], compiled=True, work="b")
    times = timer.times("train")
    assert times.eager_ms == ()
    assert times.compiled_ms == pytest.approx((4,))


@pytest.mark.parametrize(
    ("seconds", "eager", "compiled", "expected"),
    [
        (10, 30, 20, 1000),
        (10, 20, 20, math.inf),
        (10, 20, 30, math.inf),
        (None, 3, 2, None),
        (10, None, 2, None),
    ],
)
def test_break_even_steps(seconds, eager, compiled, expected):
    assert break_even_steps(seconds, eager, compiled) == expected


@pytest.mark.parametrize(
    ("wanted", "expected", "eager_steps"),
    [(10, math.inf, 12), (10, 1000, 12), (10, 16, 8), (10, 5, 0), (10, 0, 0), (0, 1000, 0), (3, 1000, 5)],
)
def test_baseline_takes_no_more_than_half_of_a_run(wanted, expected, eager_steps):
    baseline = Baseline(wanted)
    baseline.plan(expected)
    done = 0
    while baseline.running:
        done += 1
        baseline.step(sample=done > WARMUP_STEPS)
    assert done == eager_steps


def test_baseline_gives_up_where_no_step_is_a_sample():
    baseline = Baseline(5)
    baseline.plan(math.inf)
    done = 0
    while baseline.running:
        done += 1
        baseline.step(sample=False)
    assert done == 12


def test_baseline_goes_on_over_stage_runs():
    callback = InductorCompile(baseline_steps=4)
    trainer(callback, max_epochs=6, num_sanity_val_steps=0).fit(Classifier(), loader(4), loader(3))
    report = callback.report.infer
    assert report.samples == 4
    assert report.speedup == report.eager_step_ms / report.compiled_step_ms


def test_what_was_not_measured_is_none():
    callback = InductorCompile(baseline_steps=0)
    assert callback.report.train == PhaseReport(mode="default")
    trainer(callback).fit(Classifier(), loader(6))
    report = callback.report
    assert report.train.eager_step_ms is None
    assert report.train.speedup is None
    assert report.train.break_even_steps is None
    assert report.train.compiled_step_ms > 0
    assert report.train.samples == 6 - 1 - WARMUP_STEPS
    assert report.infer.compile_seconds is None
    assert report.infer.samples is None
    assert not {name for name in report.scalars() if "speedup" in name or "infer" in name}


def test_a_run_too_short_for_a_baseline_is_compiled_from_its_first_step():
    callback = InductorCompile(baseline_steps=10)
    trainer(callback).fit(Classifier(), loader(4), loader(2))
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
    assert callback.report.train.speedup is None


def test_sanity_check_is_compiled_and_not_measured():
    callback = InductorCompile(baseline_steps=2)
    trainer(callback, max_epochs=1, limit_val_batches=2).fit(Classifier(), loader(2), loader(2))
    assert callback.report.infer.graphs == 1
    assert callback.report.infer.samples is None


def test_the_same_scalars_reach_tensorboard_and_csv(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, name="tb"), CSVLogger(tmp_path, name="csv")]
    callback = InductorCompile(baseline_steps=2)
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


class Full(Logger):
    name, version = "full", 0

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        if any(name.startswith("compile/") for name in metrics):
            raise OSError("disk full")


def test_a_logger_that_raises_costs_its_numbers_not_the_run(tmp_path):
    kept = CSVLogger(tmp_path)
    with pytest.warns(CompileWarning, match="Full did not take the compile report: OSError: disk full"):
        trainer(InductorCompile(baseline_steps=0), logger=[Full(), kept]).fit(Classifier(), loader(2))
    with Path(kept.log_dir, "metrics.csv").open() as file:
        assert "compile/train/seconds" in file.read()


def test_compile_time_is_not_in_the_step_times():
    callback = InductorCompile(baseline_steps=3)
    trainer(callback).fit(Classifier(), loader(20))
    report = callback.report.train
    assert report.compile_seconds > 0.02
    assert report.compiled_step_ms < report.compile_seconds * 1000 / 2
