"""The nine runs of docs/report_gallery.py, with fixed step times: the verdict, what to do next, and the data."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest

from compile_callbacks.report.summary import describe_verdict, next_step
from tests.support.step_times import Times

DOCS = Path(__file__).parents[2] / "docs"

pytestmark = [
    pytest.mark.usefixtures("no_codegen"),
    pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning"),  # the report says the same
]


def load():
    spec = importlib.util.spec_from_file_location("report_gallery", DOCS / "report_gallery.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gallery = load()
EXAMPLES = {example.title.partition(":")[0]: example for example in gallery.EXAMPLES}

# The title, the milliseconds of an eager and a compiled step, patterns of the verdict and of the next step, and data.
RUNS = [
    (
        "Faster",
        (1000, 400),
        r"2\.5x faster \(1000 → 400 ms\), saved [\d.]+ s after [\d.]+ s of compiling",
        "None",
        lambda p: p.net_seconds_saved > 0 and p.speedup == 2.5 and p.break_even_steps < 30,
    ),
    (
        "No difference",
        (10, 10),
        r"no difference \(10\.0 vs 10\.0 ms, spread ±0\.00\), [\d.]+ s spent compiling",
        "train_mode='auto' tries other modes",
        lambda p: p.speedup is None and p.break_even_steps is None and p.net_seconds_saved < 0,
    ),
    (
        "Slower",
        (10, 12),
        r"slower by 20% \(10\.0 → 12\.0 ms\): 'reduce-overhead' .* on a CPU; lost .* s so far; try train_mode='eager'",
        "train_mode='eager' leaves the phase eager",
        lambda p: p.speedup == 10 / 12 and p.break_even_steps == math.inf,
    ),
    (
        "Too few samples",
        (10, 5),
        r"too few samples \(10\.0 → 5\.00 ms\): 3 of one kind, 5 of each are needed",
        "run more train steps, with baseline_steps=10",
        lambda p: p.speedup is None and p.net_seconds_saved is None and p.samples == 3,
    ),
    (
        "Compile time not repaid",
        (1.0, 0.9),
        r"1\.11x faster \(1\.00 → 0\.90 ms\), but .* not repaid: lost .* s so far, break-even after [\d,]+ compiled",
        "train longer",
        lambda p: p.speedup > 1 and p.net_seconds_saved < 0 and p.break_even_steps > 40,
    ),
    (
        "A recompile",
        (1.0, 0.9),
        r"1\.11x faster .* not repaid",
        r"train recompiled once \(batch size 512, was 1024\): drop_last=True .* train_mode={.dynamic.: True}, av",
        lambda p: (p.recompiles, p.graphs, p.diagnostics.eager_calls) == (1, 2, {"net": 7}),
    ),
    (
        "A graph break",
        (1.0, 0.9),
        r"1\.11x faster .* not repaid",
        r"train has 1 graph break \(report_gallery\.py:\d+\): .*print",
        lambda p: (p.graph_breaks, p.graphs, p.verified) == (1, 2, "equal 2"),
    ),
    pytest.param(
        "A fallback",
        (10, 5),
        r"not compiled: 'net' fell back to eager, because .*C\+\+ compiler.*, see CC301",
        "read why train is not compiled: compile-callbacks explain CC301",
        lambda p: (p.fallbacks, p.graphs, p.speedup, p.compiled_step_ms) == (1, 0, None, None),
        marks=pytest.mark.codegen,
    ),
    (
        "The target is never called",
        (10, 5),
        r"not compiled: the steps call no target \('head'\), see CC102",
        "read why train is not compiled: compile-callbacks explain CC102",
        lambda p: (p.compile_seconds, p.graphs, p.net_seconds_saved, p.compiled_step_ms) == (None, 0, None, None),
    ),
]


@pytest.mark.parametrize(("title", "step_ms", "verdict", "todo", "data"), RUNS)
def test_a_run_has_the_right_verdict_and_data(title, step_ms, verdict, todo, data, monkeypatch, capsys):
    example = EXAMPLES[title]
    Times(monkeypatch, train={"eager": step_ms[0], None: step_ms[1]})
    monkeypatch.setattr(gallery, "WIDTH", 8)
    rows = {"A recompile": lambda number: 1024 // (1 + number // 40), "Slower": example.rows}
    rows = rows.get(title, lambda number: 8)
    report = dataclasses.replace(example, steps=min(example.steps, 50), rows=rows).run()
    assert report.train.verdict == example.verdict
    assert re.fullmatch(verdict + ".*", describe_verdict("train", report.train))
    assert re.match(todo, str(next_step(report)))
    assert data(report.train), report.train
    lines = capsys.readouterr().out.splitlines()
    assert f"train   {describe_verdict('train', report.train)}" in lines
    assert (f"next: {next_step(report)}" in lines) == (next_step(report) is not None)


def test_the_page_shows_each_run_with_its_verdict():
    page = (DOCS / "reference" / "report_gallery.md").read_text()
    parts = dict(part.partition("\n")[::2] for part in page.split("\n## ")[1:])
    assert list(parts) == [example.title for example in gallery.EXAMPLES]
    shown = {"faster": "x faster", "compile time not repaid": "not repaid", "slower": "slower by"}
    for example in gallery.EXAMPLES:
        (line,) = [line for line in parts[example.title].splitlines() if line.startswith("train   ")]
        assert shown.get(example.verdict, example.verdict) in line
