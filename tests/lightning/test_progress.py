"""The lines that a run prints while something compiles, and why torch recompiles or skips something."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.profiling import progress
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.report import console
from tests.support.models import batches_of, fit
from tests.support.uncached import Slow

NET = CompileKey("net", "train")


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "FIRST_LINE_SECONDS", 0.2)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.3)


def test_a_run_without_a_terminal_logs_what_compiles_and_how_long_it_took_last_time(impatient, logged, tmp_path):
    def run():
        callback = InductorCompile("default", None, passes=[Slow(1)], baseline_steps=0, cache_dir=tmp_path / "cache")
        with pytest.warns(CompileWarning, match="cache_dir has no effect"):  # torch caches no graph with such a pass
            fit(callback, train=2)

    run()
    assert "compiling 'net' for the train phase ..." in logged()
    assert any(line.startswith("still compiling 'net' for the train phase: ") for line in logged())
    assert any(line.startswith("compiling 'net' for the train phase took ") for line in logged())
    run()
    assert any(line.endswith(" s in the last run)") for line in logged())


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_lines_live_with_progress_bars(bar, impatient, monkeypatch, capsys):
    monkeypatch.setattr(console.sys.stdout, "isatty", lambda: True, raising=False)
    callbacks = InductorCompile("default", None, passes=[Slow(1)], baseline_steps=0), bar()
    fit(*callbacks, train=2, enable_progress_bar=True)
    shown = "".join(capsys.readouterr())
    assert "compiling 'net' for the train phase ..." in shown
    assert "Epoch 0" in shown


@pytest.mark.usefixtures("no_codegen")
@pytest.mark.all_versions
@pytest.mark.usefixtures("recompiles_at_once")
def test_a_recompile_is_a_line_with_its_reason_and_what_avoids_it(logged):
    callback = InductorCompile({"dynamic": False}, None, targets=["net"], baseline_steps=0)
    fit(callback, train=batches_of(8, 8, 2, 3, 4, 5, 6))
    lines = [line for line in logged() if "recompil" in line]
    fix = 'drop_last=True in the DataLoader, or train_mode={"dynamic": True}, avoids it'
    assert lines[0] == f"recompiling 'net' (train): batch size 2, was 8; {fix}"
    assert len(lines) == progress.MAX_LINES + 1
    assert lines[-1].startswith("recompile: 2 more in the train phase; their reasons: ")
    recompiles = [e for e in callback.report.train.diagnostics.events if e["kind"] == "recompile"]
    assert [event["step"] for event in recompiles] == [3, 4, 5, 6, 7]


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
    recorder.record(kind, NET, **attributes)
    recorder.record(kind, NET, show=False, **attributes)
    assert lines == ([line] if line else [])
