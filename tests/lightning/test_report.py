"""The report: step times, counts with reasons, data that survives JSON and a resumed run, the table, and the plot."""

from __future__ import annotations

import dataclasses
import json
import math

import lightning.pytorch as pl
import pytest

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.report.data import PhaseDiagnostics
from compile_callbacks.report.figures import figure
from compile_callbacks.report.summary import describe_verdict
from compile_callbacks.report.table import to_markdown
from tests.support.models import Classifier, RecordingLogger, fit, loader, trainer
from tests.support.step_times import TimedSteps, Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def test_never_and_nothing_survive_json():
    report = CompileReport(train=PhaseReport(mode="default", break_even_steps=math.inf))
    data = json.loads(json.dumps(report.to_dict()))
    assert data["train"]["break_even_steps"] == "never"
    assert data["infer"]["speedup"] is None
    assert CompileReport.from_dict(data) == report
    assert "never" in str(report)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithTokens(PhaseReport):
    tokens: int = figure(lambda facts: 42, "speed", default=0, scalar="step/PHASE/tokens")


def test_a_new_figure_needs_only_its_declaration(monkeypatch):
    monkeypatch.setattr("compile_callbacks.session.session.PhaseReport", WithTokens)
    callback, logger = InductorCompile("default", None, baseline_steps=0), RecordingLogger()
    fit(callback, train=4, validation=None, logger=logger)
    report = callback.report
    assert report.train.tokens == 42
    assert [line.split() for line in str(report).splitlines() if "tokens" in line] == [["tokens", "42"]]
    assert "| tokens | 42 |" in to_markdown(report, {})
    assert logger.calls[-1][0]["step/train/tokens"] == 42
    data = json.loads(json.dumps(report.to_dict()))["train"]
    assert WithTokens.from_dict(data) == report.train
    assert WithTokens.from_dict({**data, "tokens": "many"}).tokens == 0


def test_a_row_whose_figures_are_all_zero_is_not_in_the_table():
    for mib, shown in ((0.04, False), (0.06, True)):
        train = PhaseReport(mode="default", diagnostics=PhaseDiagnostics(saved_for_backward_mib=mib))
        assert ("saved for backward MiB" in str(CompileReport(train=train))) == shown


def test_net_seconds_count_the_import_of_the_compiler_in_the_phase_that_compiles_first(monkeypatch):
    monkeypatch.setattr("compile_callbacks._torch.inductor.import_inductor", lambda: 1000.0)
    Times(monkeypatch, train={"eager": 10, None: 9}, infer={"eager": 10, None: 9})
    callback = InductorCompile(baseline_steps=5)
    fit(callback, train=12, validation=12, max_epochs=3)
    assert callback.report.train.net_seconds_saved < -999
    assert -100 < callback.report.infer.net_seconds_saved < 100


def test_compiled_steps_that_are_slower_are_warned_about_with_the_remedy(monkeypatch):
    Times(monkeypatch, train={"eager": 10, None: 12})
    callback = InductorCompile("default", None, baseline_steps=6)
    with pytest.warns(CompileWarning, match=r"compiled train steps are slower.*train_mode='eager'"):
        fit(callback, train=30)
    assert callback.report.train.break_even_steps == math.inf


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


def test_warm_up_and_compiling_steps_are_no_samples():
    steps = TimedSteps()
    assert WARMUP_STEPS == 2
    assert steps.run([90, 80, 10, 12], compiled=False) == [False, False, True, True]
    assert steps.run([900], compiled=True, compiling=True) == [False]
    assert steps.run([70, 60, 4, 6], compiled=True) == [False, False, True, True]
    assert steps.run([500], compiled=True, compiling=True) == [False]
    assert steps.run([50, 40, 5], compiled=True) == [False, False, True]
    times = steps.timer.times("train")
    assert times.eager_ms == pytest.approx((10, 12))
    assert times.compiled_ms == pytest.approx((4, 6, 5))
    assert steps.timer.times("infer").compiled_ms == ()


def test_what_was_not_measured_is_none():
    callback = InductorCompile(baseline_steps=0)
    assert callback.report.train == PhaseReport(mode="default")
    fit(callback, train=6, validation=None)
    report = callback.report
    assert (report.train.eager_step_ms, report.train.speedup, report.train.break_even_steps) == (None, None, None)
    assert report.train.compiled_step_ms > 0
    samples = report.train.diagnostics.eager_samples, report.train.diagnostics.compiled_samples
    assert samples == (0, report.train.samples)
    assert report.train.samples == 6 - 1 - WARMUP_STEPS  # the first step compiles
    assert (report.infer.compile_seconds, report.infer.samples) == (None, None)
    assert not {name for name in report.scalars() if "speedup" in name or "infer" in name}


def test_sanity_check_is_eager_and_not_measured():
    callback = InductorCompile("eager", targets=["forward"], baseline_steps=2)
    after = pl.Callback()
    after.on_sanity_check_end = lambda *args: vars(after).update(graphs=callback.report.infer.graphs)
    fit(callback, after, train=2)
    assert after.graphs == 0
    assert callback.report.infer.graphs == 1
    assert callback.report.infer.samples is None


# ------------------------------------------------------------------------------------------ the plot

EAGER, COMPILING = {"compiled": False}, {"compiling": True}
RUN = [(12, 10.0, EAGER), (1, 100.0, COMPILING), (40, 4.0, {}), (1, 900.0, COMPILING), (20, 4.0, {})]


def report_of(*parts, **figures):
    """The report of steps, each part as ``(steps, milliseconds, arguments of `TimedSteps.run`)``."""
    steps = TimedSteps()
    for number, milliseconds, ran in parts:
        steps.run([milliseconds] * number, **{"compiled": True, **ran})
    diagnostics = PhaseDiagnostics(series=steps.timer.series("train"))
    return CompileReport(train=PhaseReport(mode="default", diagnostics=diagnostics, **figures))


def axes_of(report):
    pytest.importorskip("matplotlib")
    return report.plot().axes


def legend(axes):
    return [entry.get_text() for entry in axes.get_legend().get_texts()]


def test_plot_shows_step_times_from_zero():
    (times,) = axes_of(report_of(*RUN, eager_step_ms=10.0, compiled_step_ms=4.0))
    assert set(legend(times)) == {"eager: 10 ms", "compiled: 4 ms", "2 steps that compile"}
    assert times.get_ylim()[0] == 0
    assert 10 < times.get_ylim()[1] < 20  # the compiling step of 900 ms does not flatten the others


def test_plot_tells_that_steps_cannot_be_compared_and_what_to_do():
    pytest.importorskip("matplotlib")
    report = report_of(*RUN, eager_step_ms=10.0, compiled_step_ms=9.0, verdict="not comparable")
    (title,) = (part.get_suptitle() for part in report.plot().subfigs)
    assert title.replace("\n", " ").endswith(describe_verdict("train", report.train))


def test_series_of_a_long_run_is_short_and_survives_json():
    report = report_of((5000, 4.7654321, EAGER), (1, 100.0, COMPILING), (5000, 4.1234567, {}))
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert len(json.dumps(report.to_dict())) < 40_000
