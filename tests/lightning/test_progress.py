"""Lines while something compiles."""

from __future__ import annotations

import logging
import time

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from compile_callbacks import GraphPass, InductorCompile
from compile_callbacks.profiling import progress
from compile_callbacks.report import console
from tests.support.models import Classifier, loader, trainer


class Slow(GraphPass):
    def __call__(self, graph, is_inference):
        time.sleep(1)

    def uuid(self):
        return None  # runs each time: a graph out of torch's cache would not be slow


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)


def test_a_run_without_a_terminal_gets_log_lines(impatient, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    trainer(InductorCompile("default", None, passes=[Slow()], baseline_steps=0)).fit(Classifier(), loader(2))
    said = [record.getMessage() for record in caplog.records]
    assert "compiling 'net' for the train phase ..." in said
    assert any(line.startswith("still compiling 'net' for the train phase: ") for line in said)
    assert any(line.startswith("compiled 'net' for the train phase in") for line in said)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_live_with_progress_bars(bar, impatient, monkeypatch, capsys):
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True, raising=False)
    callbacks = InductorCompile("default", None, passes=[Slow()], baseline_steps=0), bar()
    trainer(*callbacks, enable_progress_bar=True).fit(Classifier(), loader(2))
    shown = "".join(capsys.readouterr())
    assert "compiling 'net' for the train phase ..." in shown
    assert "Epoch 0" in shown
