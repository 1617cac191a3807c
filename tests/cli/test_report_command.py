"""``compile-callbacks report``: prints the reports of earlier runs, and names each damaged file and record."""

from __future__ import annotations

import json
import math

import pytest

from compile_callbacks import CompileReport, InductorCompile, PhaseReport
from compile_callbacks.cli import main
from compile_callbacks.report.data import FILE_NAME, PhaseDiagnostics
from compile_callbacks.report.file import make_record
from tests.support.models import Classifier, LoggerIn, loader, trainer

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


@pytest.fixture
def report(capsys):
    def report(*arguments, status=0):
        capsys.readouterr()
        assert main(["report", *map(str, arguments)]) == status
        return capsys.readouterr()

    return report


@pytest.mark.usefixtures("no_codegen")
def test_report_prints_the_table_of_the_run(tmp_path, report):
    callback = InductorCompile(baseline_steps=2)
    trainer(callback, logger=LoggerIn(tmp_path), max_epochs=2).fit(Classifier(), loader(12), loader(8))
    printed = report(tmp_path)
    assert str(callback.report) in printed.out
    assert "call fit" in printed.out
    assert "torch 2." in printed.out
    assert printed.err == ""
    callback.report.save(tmp_path / "new" / "saved.json")
    callback.report.save(tmp_path / "new" / "saved.json")
    saved = report(tmp_path / "new" / "saved.json")
    assert saved.out.count(str(callback.report)) == 1
    assert "None" not in saved.out.splitlines()[0]


def test_report_prints_every_call_below_a_folder_with_its_reasons(tmp_path, report):
    write(tmp_path / "a", written := record(), record(call="test"))
    write(tmp_path / "b" / "c", record())
    out = report(tmp_path).out
    assert out.count("2.00x") == 3
    assert out.index(str(tmp_path / "a")) < out.index("call test") < out.index(str(tmp_path / "b" / "c"))
    assert "Graph breaks" in out
    assert "m.py:3" in out
    file = tmp_path / "a" / FILE_NAME
    assert json.loads(report("--json", file).out)[0] == {"file": str(file), **written}


@pytest.mark.parametrize("option", [[], ["--json"]])
@pytest.mark.parametrize(
    "damaged",
    [
        None,
        {"version": 1},
        {"version": 2, "report": REPORT.to_dict()},
        {"version": 1, "report": []},
        {"version": 1, "report": {"train": {"mode": "default", "diagnostics": {"trials": [{}]}}}},
        {"version": 1, "report": {"train": {"mode": "default", "diagnostics": {"events": [{"reason": ["no text"]}]}}}},
    ],
)
def test_report_leaves_out_a_damaged_record(damaged, option, tmp_path, report):
    write(tmp_path / "a", damaged, record())
    write(tmp_path / "b", record())
    printed = report(*option, tmp_path, status=2)
    assert printed.out.count("reduce-overhead") == 2
    [line] = printed.err.splitlines()
    assert f"{tmp_path / 'a' / FILE_NAME}, record 1 is damaged" in line


@pytest.mark.parametrize("content", ["", "[" * 100_000, "{}"])
def test_report_leaves_out_a_damaged_file(content, tmp_path, report):
    write(tmp_path / "a", record())
    write(tmp_path / "b")
    (tmp_path / "b" / FILE_NAME).write_text(content)
    printed = report(tmp_path, status=2)
    assert printed.out.count("2.00x") == 1
    [line] = printed.err.splitlines()
    assert f"{tmp_path / 'b' / FILE_NAME} is damaged" in line


def test_report_refuses_a_path_without_a_report(tmp_path, report):
    nowhere = tmp_path / "nowhere"
    assert report(nowhere, status=2).err == f"compile-callbacks report: {nowhere} does not exist\n"
    assert f"{tmp_path} contains no {FILE_NAME}" in report(tmp_path, status=2).err
