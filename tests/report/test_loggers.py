"""What loggers get of a run: scalars, text and a plot. A logger that raises costs the others nothing."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import CompileReport, CompileWarning, InductorCompile
from tests.support.models import Classifier, RecordingLogger, fit, loader, trainer
from tests.support.step_times import Times

pytestmark = pytest.mark.usefixtures("captured_graph")


class Broken(RecordingLogger):
    def log_metrics(self, metrics, step):
        if any(name.startswith("compile/") for name in metrics):
            raise OSError("disk full")


def test_a_logger_that_raises_is_warned_about_once_and_scalars_are_logged_within_an_epoch(monkeypatch):
    """The steps wait for a GPU only to read the times at the end of an epoch and of the run."""
    broken, logger, waits = Broken(), RecordingLogger(), []
    Times(monkeypatch, train={"eager": 10, None: 5})
    synchronize = "compile_callbacks.profiling.step_times.PhaseTimes.synchronize"
    monkeypatch.setattr(synchronize, lambda timer: waits.append(run.global_step))
    callback = InductorCompile("default", None, baseline_steps=6, verify="off")
    run = trainer(callback, logger=[broken, logger], log_every_n_steps=4, max_epochs=2)
    with pytest.warns(CompileWarning, match="Broken did not accept the compile report: OSError: disk full") as caught:
        run.fit(Classifier(), loader(18))
    assert len([w for w in caught if "disk full" in str(w.message)]) == 1
    logged = [(step, metrics) for metrics, step in logger.calls if "compile/train/seconds" in metrics]
    assert [step for step, _ in logged] == [12, 16, 18, 22, 26, 30, 34, 36, 36]
    assert waits == [18] * 2 + [36] * 4  # of both phases
    names = ("eager_ms", "compiled_ms", "net_seconds_saved", "speedup", "break_even_steps")
    assert {*logged[1][1]} >= {f"step/train/{name}" for name in names}


def read(folder):
    return EventAccumulator(str(folder)).Reload()


@pytest.fixture(scope="module")
def board(golden):
    return read(golden.board)


@pytest.mark.all_versions
def test_the_same_scalars_reach_tensorboard_and_csv_on_rank_zero_alone(golden, board):
    ours = [[step for metrics, step in calls if "compile/train/seconds" in metrics] for calls in golden.logged]
    assert (bool(ours[0]), ours[1]) == (True, [])
    names = [f"compile/PHASE/{name}" for name in ("seconds", "graphs", "graph_breaks", "recompiles", "cache_hits")]
    names += [f"step/PHASE/{name}" for name in ("eager_ms", "compiled_ms", "speedup")]
    scalars = {name.replace("PHASE", phase) for name in names for phase in ("train", "infer")}
    columns = (golden.csv / "metrics.csv").read_text().partition("\n")[0].split(",")
    assert {*board.Tags()["scalars"]} & {*columns} >= scalars
    train = golden.report.train
    assert board.Scalars("step/train/speedup")[-1].value == pytest.approx(train.speedup, rel=1e-5)
    assert board.Scalars("compile/train/seconds")[-1].value == pytest.approx(train.compile_seconds)


def test_text_holds_the_report_and_an_image_the_plot(golden, board):
    [text, *_] = board.Tensors("compile_report/text_summary")
    shown, report = text.tensor_proto.string_val[0].decode(), golden.report
    assert shown.startswith("    train ")
    assert textwrap.indent(str(CompileReport.from_dict(golden.after_fit)), "    ") in shown
    pytest.importorskip("matplotlib")
    images = [image.encoded_image_string for image in board.Images("compile_report/steps")]
    figure = report.plot()
    assert len(figure.axes) == 2
    for png in (*images, figure._repr_png_()):  # the last one is the picture that a notebook shows
        assert png.startswith(b"\x89PNG")


def test_the_users_prefix_and_hyperparameters_are_respected(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # without matplotlib, there is no plot
    logger = TensorBoardLogger(tmp_path, prefix="mine")
    callback = InductorCompile("default", None, baseline_steps=0, verify="off")
    module = Classifier()
    module.save_hyperparameters({"lr": 0.2})
    fit(callback, make=lambda: module, train=2, logger=logger)
    board = read(logger.log_dir)
    assert board.Tags()["images"] == []
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"lr": 0.2}
    seconds = callback.report.train.compile_seconds
    assert board.Scalars("mine-compile/train/seconds")[-1].value == pytest.approx(seconds)
