"""The picture of a run: what is in it, how much it keeps, and where it goes."""

from __future__ import annotations

import json
import math
import sys

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.report.report import PhaseDiagnostics
from compile_callbacks.report.tensorboard import PLOT_TAG
from tests.support.models import Classifier, loader, trainer
from tests.support.step_times import TimedSteps

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.usefixtures("no_codegen")


def timed(*parts):
    """A timer that has timed ``(steps, milliseconds, arguments of `TimedSteps.run`)``."""
    steps = TimedSteps()
    for number, milliseconds, ran in parts:
        steps.run([milliseconds] * number, **{"compiled": True, **ran})
    return steps.timer


EAGER, COMPILING = {"compiled": False}, {"disturbed": True}
RUN = [(12, 10.0, EAGER), (1, 4000.0, COMPILING), (40, 4.0, {}), (1, 900.0, COMPILING), (20, 4.0, {})]


def report_of(timer, **figures):
    return CompileReport(
        train=PhaseReport(mode="default", diagnostics=PhaseDiagnostics(series=timer.series("train")), **figures)
    )


def texts(figure):
    """Titles and legends, panel by panel."""
    return [
        (axes.get_title("left"), [entry.get_text().replace("\n", " ") for entry in axes.get_legend().get_texts()])
        for axes in figure.axes
    ]


def test_series_has_every_step_of_a_short_run_in_order():
    series = {part["kind"]: part for part in timed(*RUN).series("train")}
    assert series["eager"]["steps"] == list(range(1, 13))
    assert series["eager"]["ms"] == pytest.approx([10.0] * 12)
    assert series["compiling"]["steps"] == [13, 54]
    assert series["compiling"]["ms"] == pytest.approx([4000.0, 900.0])
    assert series["compiled"]["steps"] == [*range(14, 54), *range(55, 75)]
    assert timed(*RUN).series("infer") == ()


def test_plot_has_medians_compiles_and_break_even():
    timer = timed(*RUN)
    figures = {"eager_step_ms": 10.0, "compiled_step_ms": 4.0, "speedup": 2.5, "compile_seconds": 4.9}
    [axes] = report_of(timer, break_even_steps=30.0, **figures).plot().axes
    lines = {line.get_label().split(" ")[0].strip(","): line.get_xdata() for line in axes.get_lines()}
    assert list(lines["break-even"]) == [43, 43]
    assert 10 < axes.get_ylim()[1] < 20  # the compiling step of 4 s does not flatten the others

    [(_, legend)] = texts(report_of(timer, break_even_steps=5000.0, **figures).plot())
    assert legend[-1] == "break-even at step 5,013"
    [(_, legend)] = texts(report_of(timer, break_even_steps=math.inf, **figures).plot())
    assert legend[-1] == "break-even: never"


def test_series_survives_json():
    report = report_of(timed(*RUN))
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    long = report_of(timed((5000, 4.1234567, {}), (5000, 4.7654321, EAGER)))
    assert len(json.dumps(long.to_dict())) < 25_000


def test_plot_says_what_is_missing(monkeypatch):
    with pytest.raises(ValueError, match="no step was timed yet"):
        CompileReport().plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib$"):
        report_of(timed(*RUN)).plot()


def images(logger):
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return {tag: events.Images(tag) for tag in events.Tags()["images"]}


def test_a_run_leaves_its_picture_in_tensorboard(tmp_path, capsys):
    callback = InductorCompile(baseline_steps=2)
    logger = TensorBoardLogger(tmp_path)
    trainer(callback, logger=logger, max_epochs=2).fit(Classifier(), loader(8), loader(8))
    [image] = images(logger)[PLOT_TAG]
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert (image.width, image.height) == (1100, 704)
    assert [title.split(":")[0] for title, _ in texts(callback.report.plot())] == ["train", "infer"]
    kinds = {part["kind"]: part["steps"] for part in callback.report.train.diagnostics.series}
    assert sorted(step for steps in kinds.values() for step in steps) == list(range(1, 17))
    assert kinds["eager"] == [1, 2, 3, 4]
    assert 5 in kinds["compiling"]

    # Without matplotlib a run has all but the picture.
    logger = TensorBoardLogger(tmp_path, name="without")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        trainer(InductorCompile(baseline_steps=2), logger=logger, max_epochs=1).fit(Classifier(), loader(8), loader(8))
    assert images(logger) == {}
    capsys.readouterr()
