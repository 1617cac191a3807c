"""Lines while something compiles."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from models import Classifier, loader, trainer

from compile_callbacks import GraphPass, InductorCompile
from compile_callbacks.measuring import progress
from compile_callbacks.measuring.events import Owner
from compile_callbacks.measuring.progress import CompileProgress
from compile_callbacks.reporting import terminal

pytestmark = pytest.mark.newest


class Slow(GraphPass):
    def __call__(self, graph, is_inference):
        time.sleep(1)

    def uuid(self):
        return None  # runs each time: a graph out of torch's cache would not be slow


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)


def test_a_long_compile_speaks_up_and_says_when_it_is_over(impatient):
    lines = []
    spoken = CompileProgress(lines.append)
    spoken.compile_begins(Owner("net", "train"))
    time.sleep(1)
    spoken.compile_ends()
    deadline = time.monotonic() + 5
    while len(lines) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines[0] == "compiling 'net' for the train phase ..."
    assert lines[1].startswith("still compiling 'net' for the train phase: ")
    assert lines[-1].startswith("compiled 'net' for the train phase in 1.")


def test_a_short_compile_is_not_talked_about():
    lines = []
    spoken = CompileProgress(lines.append)
    for _ in range(3):
        spoken.compile_begins(Owner("net", "train"))
        spoken.compile_ends()
    for thread in threading.enumerate():
        if thread.name == "compile-progress":
            thread.join(5)
    assert lines == []


def test_silence_is_never_longer_than_ten_seconds():
    assert progress.FIRST_LINE_SECONDS < 10
    assert progress.LINE_SECONDS < 10


def test_a_run_without_a_terminal_gets_log_lines(impatient, caplog):
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    trainer(InductorCompile("default", None, passes=[Slow()], baseline_steps=0)).fit(Classifier(), loader(2))
    said = [record.getMessage() for record in caplog.records]
    assert "compiling 'net' for the train phase ..." in said
    assert any(line.startswith("compiled 'net' for the train phase in") for line in said)


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_live_with_progress_bars(bar, impatient, monkeypatch, capsys):
    monkeypatch.setattr(terminal.sys.stdout, "isatty", lambda: True, raising=False)
    callbacks = InductorCompile("default", None, passes=[Slow()], baseline_steps=0), bar()
    trainer(*callbacks, enable_progress_bar=True).fit(Classifier(), loader(2))
    shown = "".join(capsys.readouterr())
    assert "compiling 'net' for the train phase ..." in shown
    assert "Epoch 0" in shown


def test_nothing_is_said_on_other_ranks(caplog, capsys):
    class OtherRank:
        is_global_zero = False

    caplog.set_level(logging.INFO)
    terminal.say(OtherRank(), "compiling")
    assert not caplog.records
    assert capsys.readouterr().out == ""
