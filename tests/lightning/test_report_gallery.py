"""The nine runs of docs/report_gallery.py, with fixed step times: the verdict, what to do next, and the data."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path

import pytest

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

LATER = "read why train is not compiled: compile-callbacks explain "
ONCE = r"train recompiled once \(batch size 512, was 1024\): drop_last=True .* train_mode={.dynamic.: True}, av"
SLOWER = "slower by 20% .*: 'reduce-overhead' .* on a CPU; lost .* s so far; try train_mode='eager'"
UNPAID, LOST, WON = r"1\.11x faster .* not repaid: lost", (-1e9, 0), (0, 1e9)
UNCOMPILED = {"graphs": 0, "speedup": None, "compiled_step_ms": None}
# The title, the milliseconds of an eager and a compiled step, patterns of the verdict and the next step, and figures or
# their ranges.
RUNS = [
    (
        "Faster",
        1000,
        400,
        r"2\.5x faster",
        None,
        {"speedup": 2.5, "net_seconds_saved": WON, "break_even_steps": (0, 30)},
    ),
    (
        *(
            "No difference",
            10,
            10,
            r"no difference \(10\.0+ vs 10\.0+ ms, spread ±0\.00\)",
            "train_mode='auto' tries",
        ),
        {"speedup": None, "break_even_steps": None, "net_seconds_saved": LOST},
    ),
    ("Slower", 10, 12, SLOWER, "train_mode='eager' leaves", {"speedup": 10 / 12, "break_even_steps": "never"}),
    (
        *("Too few samples", 10, 5, "too few samples", "run more train steps, with baseline_steps=10"),
        {"speedup": None, "net_seconds_saved": None, "samples": 3},
    ),
    (
        *("Compile time not repaid", 1.0, 0.9, UNPAID, "train longer"),
        {"speedup": (1, 2), "net_seconds_saved": LOST, "break_even_steps": (40, 1e9)},
    ),
    (
        *("A recompile", 1.0, 0.9, UNPAID, ONCE),
        {"recompiles": 1, "graphs": 2, "diagnostics": {"eager_calls": {"net": 7}}},
    ),
    (
        *("A graph break", 1.0, 0.9, UNPAID, r"train has 1 graph break \(report_gallery\.py:\d+\): .*print"),
        {"graph_breaks": 1, "graphs": 2, "verified": "equal 2"},
    ),
    pytest.param(
        *("A fallback", 10, 5, r"not compiled: 'net' fell back to eager, because .*C\+\+ compiler", f"{LATER}CC301"),
        {"fallbacks": 1, **UNCOMPILED},
        marks=pytest.mark.codegen,
    ),
    (
        *("The target is never called", 10, 5, "not compiled: the steps call no target", f"{LATER}CC102"),
        {"compile_seconds": None, "net_seconds_saved": None, **UNCOMPILED},
    ),
]


def agrees(found, expected):
    if isinstance(expected, tuple):
        return expected[0] <= found < expected[1]
    if isinstance(expected, float):
        return found == pytest.approx(expected)
    return {**found, **expected} == found if isinstance(expected, dict) else found == expected


@pytest.mark.parametrize(("title", "eager_ms", "compiled_ms", "verdict", "todo", "figures"), RUNS)
def test_a_run_has_the_right_verdict_and_data(
    title, eager_ms, compiled_ms, verdict, todo, figures, monkeypatch, capsys
):
    example = EXAMPLES[title]
    Times(monkeypatch, train={"eager": eager_ms, None: compiled_ms})
    monkeypatch.setattr(gallery, "WIDTH", 8)
    rows = {"A recompile": lambda number: 1024 // (1 + number // 40), "Slower": example.rows}
    rows = rows.get(title, lambda number: 8)
    report = dataclasses.replace(example, steps=min(example.steps, 50), rows=rows).run()
    assert report.train.verdict == example.verdict
    found = report.to_dict()["train"]
    assert {name: found[name] for name, value in figures.items() if not agrees(found[name], value)} == {}
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match(f"train   {verdict}", line)]
    nexts = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    assert len(nexts) == (todo is not None)
    assert all(re.match(todo, line) for line in nexts)


def test_the_page_shows_each_run_with_its_verdict():
    page = (DOCS / "reference" / "report_gallery.md").read_text()
    parts = dict(part.partition("\n")[::2] for part in page.split("\n## ")[1:])
    assert list(parts) == [example.title for example in gallery.EXAMPLES]
    shown = {"faster": "x faster", "compile time not repaid": "not repaid", "slower": "slower by"}
    for example in gallery.EXAMPLES:
        (line,) = [line for line in parts[example.title].splitlines() if line.startswith("train   ")]
        assert shown.get(example.verdict, example.verdict) in line
