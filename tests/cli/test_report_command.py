"""``compile-callbacks report``: the reports of earlier runs, and what bad input gets."""

from __future__ import annotations

import json
import math

import pytest

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.cli.main import main
from compile_callbacks.report.file import FILE_NAME, make_record
from compile_callbacks.report.report import PhaseDiagnostics
from tests.support.models import Classifier, loader, trainer

BREAK = {"kind": "graph_break", "target": "net", "phase": "train", "file": "m.py", "line": 3, "reason": "print\nmore"}
TRAIN = PhaseReport(
    mode="reduce-overhead",
    targets=("net",),
    compile_seconds=2.5,
    graphs=1,
    graph_breaks=2,
    eager_step_ms=3.0,
    compiled_step_ms=1.5,
    speedup=2.0,
    samples=8,
    break_even_steps=math.inf,
    diagnostics=PhaseDiagnostics(events=(BREAK, BREAK)),
)
REPORT = CompileReport(train=TRAIN)


def write(folder, *records):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE_NAME).write_text(json.dumps(records))


def record(report=REPORT, call="fit"):
    return make_record(report, call, step=10, exception=None)


def test_prints_the_table_that_the_run_printed(tmp_path, capsys):
    callback = InductorCompile(baseline_steps=2)
    trainer(callback, default_root_dir=tmp_path, max_epochs=2).fit(Classifier(), loader(12), loader(8))
    table = str(callback.report)
    assert table in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert table in out
    assert "call fit" in out
    assert "torch 2." in out
    assert err == ""


def test_every_call_below_a_folder_is_printed_with_its_reasons(tmp_path, capsys):
    write(tmp_path / "a", record(), record(call="test"))
    write(tmp_path / "b" / "c", record())
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.count("2.00x") == 3
    assert out.index(str(tmp_path / "a")) < out.index("call test") < out.index(str(tmp_path / "b" / "c"))
    assert "Graph breaks" in out
    assert "m.py:3" in out
    assert main(["report", str(tmp_path / "b" / "c" / FILE_NAME)]) == 0
    assert capsys.readouterr().out.count("2.00x") == 1


def test_compare_puts_the_last_call_of_each_run_side_by_side(tmp_path, capsys):
    infer = PhaseReport(mode="default", targets=("net",), compile_seconds=9.0, verdict="too few samples")
    write(tmp_path / "a", record(CompileReport(infer=infer)), record())
    write(tmp_path / "b", record(CompileReport(train=TRAIN, infer=infer)))
    assert main(["report", "--compare", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["a", "b", "b"], ["train", "train", "infer"]]
    cells = {line[:20].strip(): line[20:].split("  ") for line in lines[3:]}
    assert [cell.strip() for cell in cells["speedup"] if cell.strip()] == ["2.00x", "2.00x", "-"]
    assert "too few samples" in cells["verdict"][-1]


def test_json_is_the_records_as_data(tmp_path, capsys):
    write(tmp_path / "a", written := record())
    assert main(["report", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == [{"file": str(tmp_path / "a" / FILE_NAME), **written}]


@pytest.mark.parametrize("option", [[], ["--json"], ["--compare"]])
@pytest.mark.parametrize(
    "damaged",
    [
        None,
        3,
        [],
        {"version": 1},
        {"version": 2, "report": REPORT.to_dict()},
        {"version": 1, "report": []},
        {"version": 1, "report": {"train": {"mode": "default", "diagnostics": {"trials": [{}]}}}},
        {"version": 1, "report": {"train": {"mode": "default", "diagnostics": {"events": [{"reason": ["no text"]}]}}}},
    ],
)
def test_a_damaged_record_costs_that_record(damaged, option, tmp_path, capsys):
    write(tmp_path / "a", damaged, record())
    write(tmp_path / "b", record())
    assert main(["report", *option, str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.count("reduce-overhead") == 2
    assert err.count("\n") == 1
    assert f"{tmp_path / 'a' / FILE_NAME}, record 1 is damaged" in err


def test_mistyped_figures_cost_these_figures(tmp_path, capsys):
    data = record()
    data["report"]["train"] |= {"compile_seconds": "long", "graphs": [], "speedup": {}, "break_even_steps": "soon"}
    data |= {"environment": 3, "exception": ["KeyError"]}
    write(tmp_path, data)
    assert main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "reduce-overhead" in out
    assert "2.00x" not in out


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "{}", "3"])
def test_a_damaged_file_costs_that_file(content, tmp_path, capsys):
    write(tmp_path / "a", record())
    write(tmp_path / "b")
    (tmp_path / "b" / FILE_NAME).write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out.count("2.00x") == 1
    assert err.count("\n") == 1
    assert f"{tmp_path / 'b' / FILE_NAME} is damaged" in err


def test_a_path_without_a_report_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err == f"compile-callbacks report: {tmp_path / 'nowhere'} does not exist\n"
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path} contains no {FILE_NAME}" in capsys.readouterr().err
