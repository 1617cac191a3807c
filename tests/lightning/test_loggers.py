"""What loggers get of a run: scalars, charts, text and a plot. A logger that raises costs the others nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.report.loggers import PLOT_TAG, log_scalars, log_summary
from tests.support.models import Classifier, RecordingLogger, fit, loader, trainer
from tests.support.step_times import Times

pytestmark = pytest.mark.usefixtures("no_codegen")

REPORT = CompileReport(train=PhaseReport(mode="reduce-overhead", targets=("net",), compile_seconds=2.5, graphs=1))


# ------------------------------------------------------------------------------------------ any logger


class Broken(RecordingLogger):
    def log_metrics(self, metrics, step):
        if any(name.startswith("compile/") for name in metrics):
            raise OSError("disk full")


def test_a_logger_that_raises_is_warned_about_once_and_costs_the_others_nothing():
    broken, kept = Broken(), RecordingLogger()
    with pytest.warns(CompileWarning, match="Broken did not accept the compile report: OSError: disk full") as caught:
        fit(InductorCompile(baseline_steps=0), train=2, validation=None, logger=[broken, kept], max_epochs=3)
    assert len([w for w in caught if "disk full" in str(w.message)]) == 1
    # each epoch's end and the end of the run
    logged = [step for metrics, step in kept.calls if "compile/train/seconds" in metrics]
    assert logged == [2, 4, 6, 6]


def test_scalars_are_logged_within_an_epoch_without_synchronizing(monkeypatch):
    logger, waits = RecordingLogger(), []
    Times(monkeypatch, train={"eager": 10, None: 5})
    monkeypatch.setattr(StepTimer, "synchronize", lambda timer: waits.append(run.global_step))
    callback = InductorCompile("default", None, baseline_steps=6, verify="off")
    run = trainer(callback, logger=logger, log_every_n_steps=4)
    run.fit(Classifier(), loader(18))
    logged = {step: metrics for metrics, step in logger.calls if "compile/train/seconds" in metrics}
    assert list(logged) == [12, 16, 18]
    assert waits == [18, 18]
    assert set(logged[16]) >= {"step/train/eager_ms", "step/train/compiled_ms", "step/train/net_seconds_saved"}


def test_loggers_are_written_on_rank_zero_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger, board = RecordingLogger(), TensorBoardLogger(tmp_path)
    log_scalars([logger, board], REPORT.scalars(), step=1)
    log_summary([logger, board], REPORT, step=1)
    assert logger.calls == []
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------ TensorBoard


def read(logger):
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def layout(logger):
    """The layout that TensorBoard uses: a run's last."""
    [*_, last] = read(logger).Tensors("custom_scalars__config__")
    found = Layout.FromString(last.tensor_proto.string_val[0])
    return {c.title: {chart.title: tags_of(chart) for chart in c.chart} for c in found.category}


def tags_of(chart):
    """The tags of a multiline chart, or those of the line and of the two edges of a margin chart."""
    if chart.HasField("multiline"):
        return list(chart.multiline.tag)
    [series] = chart.margin.series
    return [series.value, series.lower, series.upper]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a module without hyperparameters: its loggers, and its report."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("logs")
    loggers = [TensorBoardLogger(folder, name="tensorboard"), CSVLogger(folder, name="csv")]
    callback = InductorCompile(baseline_steps=5)
    with pytest.MonkeyPatch.context() as patch:
        Times(patch, train={"eager": 10, None: 5}, infer={"eager": 10, None: 5})
        fit(callback, train=12, validation=8, logger=loggers, max_epochs=2)
    return *loggers, callback.report


@pytest.mark.all_versions
def test_the_same_scalars_reach_tensorboard_and_csv(ran):
    board, csv_logger, report = ran
    names = [f"compile/PHASE/{name}" for name in ("seconds", "graphs", "graph_breaks", "recompiles", "cache_hits")]
    names += [f"step/PHASE/{name}" for name in ("eager_ms", "compiled_ms", "speedup")]
    scalars = {name.replace("PHASE", phase) for name in names for phase in ("train", "infer")}
    with Path(csv_logger.log_dir, "metrics.csv").open() as file:
        columns = set(next(csv.reader(file)))
    events = read(board)
    assert set(events.Tags()["scalars"]) >= scalars
    assert columns >= scalars
    assert events.Scalars("step/train/speedup")[-1].value == pytest.approx(report.train.speedup, rel=1e-5)
    assert events.Scalars("compile/train/seconds")[-1].value == pytest.approx(report.train.compile_seconds)


def test_one_page_has_the_charts_of_each_phase_whose_lines_need_no_legend_and_are_not_smoothed(ran):
    logged = read(ran[0]).Tags()["scalars"]
    for phase in ("train", "infer"):
        charts = layout(ran[0])[f"torch.compile, {phase} phase"]
        # The run is on the CPU, so it logs no peak memory. A machine with a GPU has a chart for it.
        assert ("peak memory of a compiled step in MiB" in charts) == torch.cuda.is_available()
        # TensorBoard shows margin charts in reverse order, each with the line of one scalar, without smoothing.
        *_, recompiles, compiling, saved, times = charts.values()
        compiled, eager = f"step/{phase}/compiled_ms", f"step/{phase}/eager_ms"
        assert times == [compiled, compiled, eager]
        assert list(charts)[-1] == "step time in ms: compiled (line), eager (edge of the shade)"
        assert saved == [f"step/{phase}/net_seconds_saved"] * 3
        assert compiling == [f"compile/{phase}/seconds"] * 3
        assert recompiles == [f"compile/{phase}/recompiles"] * 3
        assert {*times, *saved, *compiling, *recompiles} <= set(logged)


def test_the_charts_name_the_scalars_of_a_logger_with_a_prefix(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="mine")
    log_scalars([logger], REPORT.scalars(), step=1)
    logger.experiment.flush()
    tags = layout(logger)["torch.compile, train phase"]["seconds spent compiling"]
    assert set(tags) == {"mine-compile/train/seconds"}
    assert read(logger).Scalars("mine-compile/train/seconds")[0].value == 2.5


def test_text_holds_the_report(ran):
    board, _, report = ran
    [text, *_] = read(board).Tensors("compile_report/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert f"| graphs | {report.train.graphs} | {report.infer.graphs} |" in shown
    assert shown.startswith("## Compile report\n\n**train ")
    assert "| targets | net | forward |" in shown
    assert f"| torch | {torch.__version__.partition('+')[0]}" in shown


def test_a_run_leaves_its_plot_in_tensorboard(ran):
    pytest.importorskip("matplotlib")
    board, _, report = ran
    [image] = read(board).Images(PLOT_TAG)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    figure = report.plot()
    assert len(figure.axes) == 2
    assert figure._repr_png_().startswith(b"\x89PNG")  # the picture that a notebook shows
    kinds = {part["kind"]: part["steps"] for part in report.train.diagnostics.series}
    assert sorted(step for steps in kinds.values() for step in steps) == list(range(1, 25))
    assert kinds["eager"] == [1, 2, 3, 4, 5, 6, 7]
    assert 8 in kinds["compiling"]


class Configured(Classifier):
    """Has hyperparameters, and a layout for TensorBoard."""

    def __init__(self, lr=0.1, shape=None):
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self):
        self.logger.experiment.add_custom_scalars({"mine": {"loss": ["Multiline", ["val_loss"]]}})


def test_the_users_layout_and_hyperparameters_are_left_alone_and_without_matplotlib_there_is_no_plot(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    logger = TensorBoardLogger(tmp_path)
    fit(InductorCompile(baseline_steps=5), make=lambda: Configured(lr=0.2), train=12, logger=logger)
    assert read(logger).Tags()["images"] == []
    assert layout(logger) == {"mine": {"loss": ["val_loss"]}}
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"lr": 0.2, "shape": None}
