"""The picture of a run: what is in it, how much it keeps, and where it goes."""

from __future__ import annotations

import itertools
import json
import math
import sys

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from models import Classifier, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.measuring.series import KEPT_STEPS, StepSeries
from compile_callbacks.measuring.timing import StepTimer
from compile_callbacks.measuring.work import Work
from compile_callbacks.reporting.tensorboard import PLOT_TAG

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.newest


class Time:
    """A span that is known when it is asked for."""

    def __init__(self, milliseconds, passed=True):
        self.value, self.is_known = milliseconds, passed

    def passed(self):
        return self.is_known

    def milliseconds(self):
        return self.value


def timed(*parts):
    """A timer that has timed ``(steps, milliseconds, arguments of stop)``."""
    now = [0.0]
    timer = StepTimer(lambda: now[0])
    for steps, milliseconds, ran in parts:
        for _ in range(steps):
            timer.start(cuda=False)
            now[0] += milliseconds / 1000
            timer.stop("train", work=Work("w"), **{"compiled": True, "disturbed": False, **ran})
    return timer


EAGER, COMPILING = {"compiled": False}, {"disturbed": True}
RUN = [(12, 10.0, EAGER), (1, 4000.0, COMPILING), (40, 4.0, {}), (1, 900.0, COMPILING), (20, 4.0, {})]


def report_of(timer, **figures):
    return CompileReport(train=PhaseReport(mode="default", series=timer.series("train"), **figures))


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


def test_series_of_a_long_run_is_bounded_even_and_in_step_with_nothing():
    series = StepSeries()
    for step in range(1, 100_001):
        series.add(step, Time(4.0 if step % 4 else 40.0))  # every fourth step also updates the weights
    kept = series.read()
    assert KEPT_STEPS / 2 <= len(kept) <= KEPT_STEPS
    steps = [step for step, _ in kept]
    assert steps == sorted(set(steps))
    assert steps[0] <= 256
    assert steps[-1] > 99_000
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 512
    assert 0.15 < sum(ms == 40.0 for _, ms in kept) / len(kept) < 0.35


def test_series_waits_for_the_gpu_only_when_it_is_read():
    series = StepSeries(limit=4)
    times = [Time(5.0, passed=False) for _ in range(20)]
    for time in times:
        time.milliseconds = lambda: pytest.fail("waited")
    for step, time in enumerate(times):
        series.add(step, time)
    for time in times:
        time.milliseconds = lambda: 5.0
    assert {ms for _, ms in series.read()} == {5.0}
    assert series.read() == series.read()


def test_plot_has_medians_compiles_and_break_even():
    timer = timed(*RUN)
    figures = {"eager_step_ms": 10.0, "compiled_step_ms": 4.0, "speedup": 2.5, "compile_seconds": 4.9}
    [(title, legend)] = texts(report_of(timer, break_even_steps=30.0, **figures).plot())
    assert title == "train: default, compiled in 4.9 s, 2.50x as fast as eager"
    assert legend == [
        "eager, median 10 ms",
        "compiled, median 4 ms",
        "2 steps that compile",
        "break-even at step 43",
    ]
    [axes] = report_of(timer, break_even_steps=30.0, **figures).plot().axes
    lines = {line.get_label().split(" ")[0].strip(","): line.get_xdata() for line in axes.get_lines()}
    assert list(lines["break-even"]) == [43, 43]
    assert axes.get_xlabel() == "train step"
    assert axes.get_ylabel() == "ms a step"
    assert 10 < axes.get_ylim()[1] < 20  # the compiling step of 4 s does not flatten the others

    [(_, legend)] = texts(report_of(timer, break_even_steps=5000.0, **figures).plot())
    assert legend[-1] == "break-even at step 5,013, after this run"
    [(_, legend)] = texts(report_of(timer, break_even_steps=math.inf, **figures).plot())
    assert legend[-1] == "break-even: never"


def test_plot_of_a_tuned_phase_names_what_was_tried():
    timer = timed((12, 10.0, EAGER), (4, 12.0, {"settings": "default"}), (40, 4.0, {"settings": "reduce-overhead"}))
    phase = PhaseReport(mode="reduce-overhead", eager_step_ms=10.0, compiled_step_ms=4.0, series=timer.series("train"))
    [(_, legend)] = texts(CompileReport(train=phase).plot())
    assert legend == ["eager, median 10 ms", "default, tried, median 12 ms", "reduce-overhead, median 4 ms"]


def test_plot_of_a_resumed_run_has_the_earlier_baseline():
    [(_, legend)] = texts(report_of(timed((20, 4.0, {})), eager_step_ms=10.0, compiled_step_ms=4.0).plot())
    assert legend == ["compiled, median 4 ms", "eager, median 10 ms, of the run before this one"]


def test_nothing_in_the_picture_overlaps():
    timer = timed(*RUN)
    phase = PhaseReport(
        mode="options={" + "x" * 200, break_even_steps=9e9, eager_step_ms=10.0, series=timer.series("train")
    )
    figure = CompileReport(train=phase, infer=phase).plot()
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    boxes = [axes.get_tightbbox(renderer) for axes in figure.axes]
    assert boxes[0].y0 >= boxes[1].y1 - 1  # the first panel is above the second
    for axes, box in zip(figure.axes, boxes, strict=True):
        assert axes.get_legend().get_window_extent(renderer).x0 >= axes.get_window_extent(renderer).x1
        assert box.x0 >= -1
        assert box.x1 <= figure.bbox.width + 1


def test_series_survives_json():
    report = report_of(timed(*RUN))
    assert CompileReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    long = report_of(timed((5000, 4.1234567, {}), (5000, 4.7654321, EAGER)))
    assert len(json.dumps(long.to_dict())) < 25_000


def test_plot_says_what_is_missing(monkeypatch):
    with pytest.raises(ValueError, match="no step was timed yet"):
        CompileReport().plot()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib \[see docs/troubleshooting\.md#no-plot\]$"):
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
    kinds = {part["kind"]: part["steps"] for part in callback.report.train.series}
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
