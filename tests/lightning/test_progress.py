"""The lines that a run prints while something compiles, and why torch recompiles or skips something."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.recorder import CompileRecorder
from tests.support.models import batches_of, fit
from tests.support.uncached import Slow

NET = "compiling 'net' for the train phase"

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("compile_callbacks.profiling.progress.FIRST_LINE_SECONDS", 0.1)
    monkeypatch.setattr("compile_callbacks.profiling.progress.LINE_SECONDS", 0.1)


def slow(**settings):
    return InductorCompile("default", None, passes=[Slow(0.2)], baseline_steps=0, verify="off", **settings)


def test_a_run_without_a_terminal_logs_what_compiles_and_how_long_it_took_last_time(impatient, logged, tmp_path):
    for _ in range(2):
        callback = slow(cache_dir=tmp_path / "cache")
        with pytest.warns(CompileWarning, match="cache_dir has no effect"):  # torch caches no graph with such a pass
            fit(callback, train=2, validation=None)
    assert any(line.startswith("still compiling 'net' for the train phase: ") for line in logged())
    first, second = [line for line in logged() if line.startswith(f"{NET} ...")]
    assert first == f"{NET} ..."
    assert second.endswith(" s in the last run)")
    assert any(line.startswith(f"{NET} took ") for line in logged())


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_live_with_progress_bars(bar, impatient, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    fit(slow(), bar(), train=2, validation=None, enable_progress_bar=True)
    shown = "".join(capsys.readouterr())
    assert f"{NET} ..." in shown
    assert "Epoch 0" in shown


@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once")
def test_a_recompile_is_a_line_with_its_reason_and_what_avoids_it(logged):
    callback = InductorCompile({"dynamic": False}, None, targets=["net"], baseline_steps=0, verify="off")
    fit(callback, train=batches_of(8, 8, 2, 3, 4, 5, 6), validation=None)
    lines = [line for line in logged() if "recompil" in line]
    fix = 'drop_last=True in the DataLoader, or train_mode={"dynamic": True}, avoids it'
    assert lines[0] == f"recompiling 'net' (train): batch size 2, was 8; {fix}"
    assert len(lines) == 4
    assert lines[-1].startswith("recompile: 2 more in the train phase; their reasons: ")
    events = callback.report.train.diagnostics.events
    assert [event["step"] for event in events if event["kind"] == "recompile"] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("kind", "attributes", "line"),
    [
        (
            "graph_break",
            {"file": "/a/m.py", "line": 3, "reason": "print"},
            "graph break in 'net' (train) at m.py:3: print",
        ),
        ("fallback", {"reason": "no\ncompiler"}, "'net' (train) falls back to eager: no compiler"),
        ("cudagraph_skip", {"reason": "mutated inputs"}, "CUDA graph of 'net' (train) skipped: mutated inputs"),
        ("verify", {"verdict": "equal"}, None),
    ],
)
def test_an_event_with_a_cause_is_a_line(kind, attributes, line):
    lines = []
    recorder = CompileRecorder(progress=CompileProgress(lines.append))
    recorder.record(kind, CompileKey("net", "train"), **attributes)
    recorder.record(kind, CompileKey("net", "train"), show=False, **attributes)
    assert lines == ([line] if line else [])
