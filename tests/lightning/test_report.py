"""The report: step times, counts with reasons, data that survives JSON and a resumed run, and the table."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.report.report import PhaseDiagnostics
from compile_callbacks.report.summary import describe_verdict
from tests.support.models import Classifier, loader, seeded, trainer
from tests.support.step_times import TimedSteps, Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def test_never_and_nothing_survive_json():
    report = CompileReport(train=PhaseReport(mode="default", break_even_steps=math.inf))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["train"]["break_even_steps"] == "never"
    assert data["infer"]["speedup"] is None
    assert CompileReport.from_dict(data) == report
    assert "never" in str(report)


def test_a_row_whose_figures_are_all_zero_is_not_in_the_table():
    for mib, shown in ((0.04, False), (0.06, True)):
        train = PhaseReport(mode="default", diagnostics=PhaseDiagnostics(saved_for_backward_mib=mib))
        assert ("saved for backward MiB" in str(CompileReport(train=train))) == shown


def test_net_seconds_count_the_import_of_the_compiler_in_the_phase_that_compiles_first(monkeypatch):
    monkeypatch.setattr("compile_callbacks._torch.inductor.import_inductor", lambda: 1000.0)
    callback = InductorCompile(baseline_steps=5)
    trainer(callback, max_epochs=3).fit(Classifier(), loader(12), loader(12))
    assert callback.report.train.net_seconds_saved < -999
    assert -100 < callback.report.infer.net_seconds_saved < 100


def test_compiled_steps_that_are_slower_are_warned_about_with_the_remedy(monkeypatch):
    Times(monkeypatch, train={"eager": 10, None: 12})
    callback = InductorCompile("default", None, baseline_steps=6)
    with pytest.warns(CompileWarning, match=r"compiled train steps are slower.*train_mode='eager'"):
        trainer(callback).fit(Classifier(), loader(30))
    assert callback.report.train.break_even_steps == math.inf


def test_a_resumed_run_knows_its_baseline_and_says_so(tmp_path, monkeypatch):
    Times(monkeypatch, train=lambda name, workload: 10 if name == "eager" else next(milliseconds))
    milliseconds = itertools.count(4, 0.001)
    first = InductorCompile(baseline_steps=5)
    run = trainer(first, enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(seeded(), loader(16))
    run.save_checkpoint(tmp_path / "run.ckpt")

    second = InductorCompile(baseline_steps=5)
    module = seeded()
    trainer(second, max_epochs=2).fit(module, loader(16), ckpt_path=tmp_path / "run.ckpt")
    report = second.report
    assert report.before == first.report
    assert report.train.eager_step_ms == first.report.train.eager_step_ms
    assert report.train.diagnostics.restored == ("eager_step_ms", "eager_spread_ms")
    assert report.train.samples == 5
    assert report.train.compiled_step_ms != first.report.train.compiled_step_ms
    assert "train: eager steps were measured in the run before this one" in str(report)
    assert "the eager steps of the earlier run" in describe_verdict("train", report.train)
    assert len(module.losses) == 16


def test_a_resumed_run_measures_again_if_the_checkpoint_has_no_state_of_the_callback(tmp_path):
    run = trainer(InductorCompile(baseline_steps=4), enable_checkpointing=True, default_root_dir=tmp_path)
    run.fit(seeded(), loader(14))
    run.save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=False)
    del checkpoint["compile_callbacks"]
    torch.save(checkpoint, tmp_path / "new_baseline.ckpt")

    second = InductorCompile(baseline_steps=4)
    trainer(second, max_epochs=2).fit(seeded(), loader(14), ckpt_path=tmp_path / "new_baseline.ckpt")
    assert second.report.before is None
    assert second.report.train.eager_step_ms is not None
    assert second.report.train.diagnostics.restored == ()


def test_the_table_is_printed_once_after_a_fit(capsys):
    callback = InductorCompile(baseline_steps=0)
    run = trainer(callback)
    module = Classifier()
    run.fit(module, loader(2), loader(2))
    run.validate(module, loader(2), verbose=False)
    run.predict(module, loader(2))
    shown = capsys.readouterr().out
    assert shown.count("cache hits / misses") == 1
    assert "net" in shown


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


def test_what_was_not_measured_is_none():
    callback = InductorCompile(baseline_steps=0)
    assert callback.report.train == PhaseReport(mode="default")
    trainer(callback).fit(Classifier(), loader(6))
    report = callback.report
    assert report.train.eager_step_ms is None
    assert report.train.speedup is None
    assert report.train.break_even_steps is None
    assert report.train.compiled_step_ms > 0
    samples = report.train.diagnostics.eager_samples, report.train.diagnostics.compiled_samples
    assert samples == (0, report.train.samples)
    assert report.train.samples == 6 - 2 - WARMUP_STEPS  # the first step is eager, the second one compiles
    assert report.infer.compile_seconds is None
    assert report.infer.samples is None
    assert not {name for name in report.scalars() if "speedup" in name or "infer" in name}


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
