"""What each logger gets, and what a logger that raises costs."""

from __future__ import annotations

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from compile_callbacks import CompileReport, CompileWarning, InductorCompile, PhaseReport
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.report.loggers import log_scalars, log_summary
from tests.support.models import Classifier, RecordingLogger, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

REPORT = CompileReport(train=PhaseReport(mode="reduce-overhead", targets=("net",), compile_seconds=2.5, graphs=1))


class Broken(RecordingLogger):
    def log_metrics(self, metrics, step):
        if any(name.startswith("compile/") for name in metrics):
            raise OSError("disk full")


def test_a_logger_that_raises_is_warned_about_once_and_costs_the_others_nothing():
    broken, kept = Broken(), RecordingLogger()
    with pytest.warns(CompileWarning, match="Broken did not accept the compile report: OSError: disk full") as caught:
        trainer(InductorCompile(baseline_steps=0), logger=[broken, kept], max_epochs=3).fit(Classifier(), loader(2))
    assert len([w for w in caught if "disk full" in str(w.message)]) == 1
    # each epoch's end and the end of the run
    logged = [step for metrics, step in kept.calls if "compile/train/seconds" in metrics]
    assert logged == [2, 4, 6, 6]


def test_scalars_are_logged_within_an_epoch_without_synchronizing(monkeypatch):
    logger, waits = RecordingLogger(), []
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
