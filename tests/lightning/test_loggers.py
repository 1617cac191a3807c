"""What each logger gets, and what a logger that raises costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.report.loggers import log_scalars, log_summary
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

REPORT = CompileReport(
    train=PhaseReport(
        mode="reduce-overhead",
        targets=("net",),
        compile_seconds=2.5,
        graphs=1,
        eager_step_ms=3.0,
        compiled_step_ms=1.5,
        speedup=2.0,
        samples=8,
        break_even_steps=1667.0,
    )
)


class Recorded(Logger):
    """Keeps the calls that it gets."""

    name, version = "recorded", 0

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_hyperparams(self, params):
        pass

    def log_metrics(self, *, metrics, step):
        self.calls.append(("log_metrics", metrics, step))


class LikeWandb(Recorded):
    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.calls.append(("log_table", key, columns, data, step))


class LikeMLFlow(Recorded):
    run_id = "abc"

    @property
    def experiment(self):
        return SimpleNamespace(log_text=lambda *args: self.calls.append(("log_text", *args)))


class LikeComet(Recorded):
    @property
    def experiment(self):
        def log_text(text, step=None, metadata=None):
            self.calls.append(("log_text", text, step))

        return SimpleNamespace(log_text=log_text)


class Broken(Recorded):
    def log_metrics(self, metrics, step):
        if any(name.startswith("compile/") for name in metrics):
            raise OSError("disk full")


def test_summary_is_a_table_a_file_or_a_text_where_the_logger_has_a_place_for_it():
    wandb, mlflow, comet, plain = LikeWandb(), LikeMLFlow(), LikeComet(), Recorded()
    log_summary([wandb, mlflow, comet, plain], REPORT, step=7)

    [(method, key, columns, data, step)] = wandb.calls
    assert (method, key, columns, step) == ("log_table", "compile_report", ["figure", "train"], 7)
    assert ["mode", "reduce-overhead"] in data
    assert ["speedup", "2.00x"] in data
    [(_, run_id, text, file)] = mlflow.calls
    assert (run_id, file) == ("abc", "compile_report.md")
    assert "| speedup | 2.00x |" in text
    assert comet.calls == [("log_text", text, 7)]
    assert plain.calls == []


def test_a_logger_that_raises_is_warned_about_once_and_costs_the_others_nothing():
    broken, kept = Broken(), Recorded()
    with pytest.warns(CompileWarning, match="Broken did not accept the compile report: OSError: disk full") as caught:
        trainer(InductorCompile(baseline_steps=0), logger=[broken, kept], max_epochs=3).fit(Classifier(), loader(2))
    assert len([w for w in caught if "disk full" in str(w.message)]) == 1
    # each epoch's end and the end of the run
    logged = [step for _, metrics, step in kept.calls if "compile/train/seconds" in metrics]
    assert logged == [2, 4, 6, 6]


def test_scalars_are_logged_within_an_epoch_without_synchronizing(monkeypatch):
    logger, waits = Recorded(), []
    monkeypatch.setattr(StepTimer, "synchronize", lambda timer: waits.append(run.global_step))
    callback = InductorCompile("default", None, baseline_steps=6, verify="off")
    run = trainer(callback, logger=logger, log_every_n_steps=4)
    run.fit(Classifier(), loader(18))
    logged = {step: metrics for _, metrics, step in logger.calls if "compile/train/seconds" in metrics}
    assert list(logged) == [12, 16, 18]
    assert waits == [18, 18]
    assert set(logged[16]) >= {"step/train/eager_ms", "step/train/compiled_ms", "step/train/net_seconds_saved"}


def test_loggers_are_written_on_rank_zero_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger, board = LikeComet(), TensorBoardLogger(tmp_path)
    log_scalars([logger, board], REPORT.scalars(), step=1)
    log_summary([logger, board], REPORT, step=1)
    assert logger.calls == []
    assert list(tmp_path.iterdir()) == []
