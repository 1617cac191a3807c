"""The plot of a run: what it shows, and how much the report keeps for it."""

from __future__ import annotations

import json

import pytest
import torch

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.report.report import PhaseDiagnostics
from tests.support.models import FEATURES, Classifier, fit
from tests.support.step_times import TimedSteps

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("no_codegen")

EAGER, COMPILING = {"compiled": False}, {"disturbed": True}
RUN = [(12, 10.0, EAGER), (1, 100.0, COMPILING), (40, 4.0, {}), (1, 900.0, COMPILING), (20, 4.0, {})]


def report_of(*parts, **figures):
    """The report of steps, each part as ``(steps, milliseconds, arguments of `TimedSteps.run`)``."""
    steps = TimedSteps()
    for number, milliseconds, ran in parts:
        steps.run([milliseconds] * number, **{"compiled": True, **ran})
    saved = steps.timer.savings("train")
    diagnostics = PhaseDiagnostics(
        series=steps.timer.series("train"),
        net_series=dict(zip(("steps", "seconds"), map(list, zip(*saved.curve, strict=True)), strict=True))
        if saved
        else {},
    )
    return CompileReport(train=PhaseReport(mode="default", diagnostics=diagnostics, **figures))


def legend(axes):
    return [entry.get_text() for entry in axes.get_legend().get_texts()]


def test_plot_shows_net_seconds_saved_and_step_times_from_zero():
    saved, times = report_of(*RUN, eager_step_ms=10.0, compiled_step_ms=4.0).plot().axes
    curve = dict(saved.get_lines()[1].get_xydata().tolist())
    assert (curve[12], curve[13]) == (0, pytest.approx(-0.09))
    assert curve[53] == pytest.approx(0.15)
    assert curve[74] == pytest.approx(0.15 - 0.89 + 0.12)
    assert legend(saved) == ["compile time repaid at step 29", "2 steps that compile"]
    assert set(legend(times)) == {"eager: 10 ms", "compiled: 4 ms", "2 steps that compile"}
    assert times.get_ylim()[0] == 0
    assert 10 < times.get_ylim()[1] < 20  # the compiling step of 900 ms does not flatten the others


def test_plot_marks_a_compile_outside_the_steps():
    class CallsNet(Classifier):
        def on_train_epoch_end(self):
            self.net(torch.zeros(2, FEATURES))

    callback = InductorCompile({"dynamic": False}, None, baseline_steps=0, new_shapes="recompile", verify="off")
    fit(callback, make=CallsNet, train=6, validation=None)
    for axes in callback.report.plot().axes:
        assert set(legend(axes)) >= {"step that compiles", "1 compile outside these steps"}


def test_series_of_a_long_run_is_short_and_survives_json():
    report = report_of((5000, 4.7654321, EAGER), (1, 100.0, COMPILING), (5000, 4.1234567, {}))
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    assert len(json.dumps(report.to_dict())) < 40_000
    net = report.train.diagnostics.net_series
    assert net["steps"][-1] == 10_001
    assert net["seconds"][-1] == pytest.approx(5000 * (4.7654321 - 4.1234567) / 1000 - 0.095, rel=1e-2)
