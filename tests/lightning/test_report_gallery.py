"""The runs of docs/report_gallery.py, with fixed step times: the verdict, what to do next, and the page."""

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
spec = importlib.util.spec_from_file_location("report_gallery", DOCS / "report_gallery.py")
gallery = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gallery)
EXAMPLES = {example.title.partition(":")[0]: example for example in gallery.EXAMPLES}

LATER = "read why train is not compiled: compile-callbacks explain "
ONCE = r"train recompiled once \(batch size 512, was 1024\): drop_last=True .* train_mode={.dynamic.: True}, av"
UNPAID = r"1\.11x faster .* not repaid: lost .*, break-even after"
# The title, the milliseconds of an eager and a compiled step, and patterns of the verdict and the next step.
RUNS = [
    ("Faster", 1000, 400, r"2\.5x faster \(1000 → 400 ms\), saved ", None),
    ("No difference", 10, 10, r"no difference \(10\.0+ vs 10\.0+ ms, spread ±0\.00\)", "train_mode=.auto. tries"),
    ("Slower", 10, 12, "slower by 20% .*: 'reduce-overhead' .* on a CPU; lost .*; try train_mode='eager'",
     "train_mode='eager' leaves"),
    ("Too few samples", 10, 5, r"too few samples \(.*\): 3 of one kind", "run more train steps, with baseline"),
    ("Compile time not repaid", 1.0, 0.9, UNPAID, "train longer"),
    ("A recompile", 1.0, 0.9, UNPAID, ONCE),
    ("A graph break", 1.0, 0.9, UNPAID, r"train has 1 graph break \(report_gallery\.py:\d+\): .*print"),
    pytest.param("A fallback", 10, 5, r"not compiled: 'net' fell back to eager, because .*C\+\+ compiler",
                 f"{LATER}CC301", marks=pytest.mark.codegen),
    ("The target is never called", 10, 5, "not compiled: the steps call no target", f"{LATER}CC102"),
]  # fmt: skip


@pytest.mark.parametrize(("title", "eager", "compiled", "verdict", "todo"), RUNS)
def test_a_run_has_the_right_verdict_and_advice(title, eager, compiled, verdict, todo, monkeypatch, capsys):
    example = EXAMPLES[title]
    Times(monkeypatch, train={"eager": eager, None: compiled})
    monkeypatch.setattr(gallery, "WIDTH", 8)
    rows = {"A recompile": lambda number: 1024 // (1 + number // 40), "Slower": example.rows}
    rows = rows.get(title, lambda number: 8)
    train = dataclasses.replace(example, steps=min(example.steps, 50), rows=rows).run().train
    assert train.verdict == example.verdict
    assert (train.graphs == 0, train.compiled_step_ms is None) == ("not compiled" in verdict,) * 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match(f"train   {verdict}", line)], lines
    nexts = [line.removeprefix("next: ") for line in lines if line.startswith("next: ")]
    assert len(nexts) == (todo is not None)
    assert all(re.match(todo, line) for line in nexts)
    if title == "A recompile":
        assert (train.recompiles, train.graphs, train.diagnostics.eager_calls) == (1, 2, {"net": 7})


def test_the_page_shows_four_runs_with_their_verdicts():
    page = (DOCS / "reference" / "report.md").read_text()
    shown = {"faster": "x faster", "compile time not repaid": "not repaid"}
    verdicts = {example.title: example.verdict for example in gallery.EXAMPLES}
    for title, (sentence, rows) in gallery.SHOWN.items():
        lines = page.partition(f"{sentence}\n\n```text\n")[2].partition("\n```\n")[0]
        assert gallery.shortened(lines, rows) == lines
        assert lines.startswith("train   ")
        assert shown.get(verdicts[title], verdicts[title]) in lines.splitlines()[0]


def test_the_readme_shows_the_report_of_its_run():
    assert f"```text\n{gallery.readme_report()}\n```\n" in gallery.README.read_text()
