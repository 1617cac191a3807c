"""The lines that a run prints while something compiles, and why torch recompiles or skips something."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from compile_callbacks import CompileWarning, InductorCompile
from tests.cases.zoo import Calls
from tests.support.models import Classifier, batches_of, fit, mlp
from tests.support.uncached import Slow

NET = "compiling 'net' for the train phase"

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.fixture
def impatient(monkeypatch):
    for name in ("FIRST_LINE_SECONDS", "LINE_SECONDS"):
        monkeypatch.setattr(f"compile_callbacks.profiling.recorder.{name}", 0.1)


def slow(**settings):
    return InductorCompile("default", None, passes=[Slow(0.2)], baseline_steps=0, verify="off", **settings)


def test_a_run_without_a_terminal_logs_what_compiles_and_how_long_it_took(impatient, logged, tmp_path):
    with pytest.warns(CompileWarning, match="cache_dir has no effect"):  # torch caches no graph with such a pass
        fit(slow(cache_dir=tmp_path / "cache"), train=2, validation=None)
    assert any(line.startswith("still compiling 'net' for the train phase: ") for line in logged())
    assert logged().count(f"{NET} ...") == 1
    assert any(line.startswith(f"{NET} took ") for line in logged())


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_live_with_progress_bars(bar, impatient, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    fit(slow(), bar(), train=2, validation=None, enable_progress_bar=True)
    shown = "".join(capsys.readouterr())
    assert f"{NET} ..." in shown
    assert "Epoch 0" in shown


def breaks_first(net, x):
    x = x.sin()
    torch._dynamo.graph_break()
    return net(x)


@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once", "captured_graph")
def test_events_are_lines_with_their_cause_and_what_avoids_it(logged, monkeypatch):
    settings = {"targets": ["net"], "baseline_steps": 0, "verify": "off"}
    callback = InductorCompile({"dynamic": False}, None, **settings)
    fit(callback, train=batches_of(8, 8, 2, 3, 4, 5, 6), validation=None)
    lines = [line for line in logged() if "recompil" in line]
    fix = 'drop_last=True in the DataLoader, or train_mode={"dynamic": True}, avoids it'
    assert lines[0] == f"recompiling 'net' (train): batch size 2, was 8; {fix}"
    assert len(lines) == 3
    assert lines[-1].endswith(" (further events: report.train.diagnostics.events)")
    events = callback.report.train.diagnostics.events
    assert [event["step"] for event in events if event["kind"] == "recompile"] == [3, 4, 5, 6, 7]
    breaks = InductorCompile("default", None, **settings)
    fit(breaks, make=lambda: Classifier(Calls(mlp(), breaks_first)), train=2, validation=None)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", mock.Mock(side_effect=ValueError("no\ncompiler")))
    with pytest.warns(CompileWarning, match="CC301"):
        fit(InductorCompile("default", None, **settings), train=2, validation=None)
    fallback = "'net' (train) falls back to eager: ValueError: no compiler"
    for begin in ("graph break in 'net' (train) at test_progress.py:", fallback):
        assert len([line for line in logged() if line.startswith(begin)]) == 1, logged()
