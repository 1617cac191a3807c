"""The files in benchmarks/results have the documented shape, and the pages show their figures."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("pages")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.json")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_result_file_has_the_documented_shape_and_its_origin_and_stands_in_one_table(path, pages):
    result = json.loads(path.read_text())
    assert set(result) == {"title", "date", "device", "versions", "command", "commit", "rows"}
    assert list(result["versions"]) == ["python", "torch", "triton", "lightning"]
    assert all([*result.values(), *result["versions"].values()])
    assert dt.date.fromisoformat(result["date"])
    assert result["command"].startswith(("python benchmarks/", "make "))
    for row in result["rows"]:
        for name, value in row.items():
            if name.endswith(("_ms", "_seconds")) and not isinstance(value, list):
                assert value is None or value > 0 or (value == 0 and name.startswith(("spread", "exposed", "compile")))
    assert sum(path in FOLDER.glob(f"*/{table.files}.json") for table in pages.TABLES.values()) == 1


def test_figures_and_chart_are_those_of_the_result_files(pages, monkeypatch):
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    pages.main()

    def other(found):
        used.add(found[3])
        return found[1] + re.sub(r"\d\b", lambda digit: str((int(digit[0]) + 1) % 10), found[4]) + found[5]

    used = set()
    for text in [path.read_text() for path in pages.PAGES]:
        assert pages.filled(pages.FIGURES.sub(other, text)) == text  # each figure of the page comes from a file
    names = [*pages.TABLES, *(summary.__name__ for summary in pages.SUMMARIES)]
    assert len(names) == len(set(names))
    assert {"answer"} <= used - {None} <= set(names)


def test_machine_has_the_figures_of_its_file(pages):
    """Computed here again, without the code of the pages."""
    rows = json.loads((FOLDER / "h200" / "resnet50_train.json").read_text())["rows"]
    text = (FOLDER / "h200.md").read_text()
    for way in {row["way"] for row in rows}:
        cells = [way]
        for row in sorted((row for row in rows if row["way"] == way), key=lambda row: row["batch_size"]):
            low, high = row["speedup_interval"] or (0, 0)
            speedup = f"{row['speedup']:.2f}x ({low:.2f} to {high:.2f})" if row["speedup"] else ""
            cells += [f"{row['step_ms']:.2f}", speedup]
        assert f"| {' | '.join(cells)} |" in text


@pytest.fixture
def results(pages, monkeypatch, tmp_path):
    """An empty folder of results, and a page of the machine in it."""
    (tmp_path / "new").mkdir()
    monkeypatch.setattr("tables.RESULTS", tmp_path)
    return tmp_path / "new", "# Page\n\n<!-- figures: new -->\n<!-- end of figures -->\n"


def test_table_without_a_file_is_left_out_with_its_heading(pages, results):
    folder, page = results
    assert pages.filled(page) == page
    shutil.copy(FOLDER / "h200" / "fsdp2.json", folder)
    result = json.loads((folder / "fsdp2.json").read_text())
    filled = pages.filled(page)
    assert re.findall(r"^## (.*)$", filled, re.MULTILINE) == [pages.TABLES["fsdp2"].heading]
    assert f"{result['device']}, Python {result['versions']['python']}" in filled
    assert f"commit {result['commit']}, {result['date']}:" in filled
    assert result["command"] in filled
    (folder / "fsdp2.json").unlink()
    assert pages.filled(filled) == page


def test_files_of_several_commits_are_shown_apart_and_failed_rows_are_named(pages, results):
    folder, page = results
    for name, commit in {"ordinary_bert": "1234567", "ordinary_gpt2": "89abcde"}.items():
        result = json.loads((FOLDER / "h200" / f"{name}.json").read_text()) | {"commit": commit}
        result["rows"][0] |= {"step_ms": None, "failure": "Traceback\nRuntimeError: no"}
        (folder / f"{name}.json").write_text(json.dumps(result))
    filled = pages.filled(page)
    assert filled.index("commit 1234567") < filled.index("bert, batch 16:") < filled.index("commit 89abcde")
    assert filled.count(": RuntimeError: no\n") == 2


@pytest.mark.parametrize("name", ["memory", "warm_ranks"])
def test_table_has_a_line_for_each_row(name, pages, results):
    """Of a table that may have no file yet."""
    folder, _ = results
    table = pages.TABLES[name]
    (columns,) = table.show.args
    rows = [{column: "x" if form == "{}" else 1.0 for column, form in columns.items()}]
    result = json.loads((FOLDER / "h200" / "fsdp2.json").read_text()) | {"rows": rows}
    (folder / f"{table.files.replace('*', '1b')}.json").write_text(json.dumps(result))
    lines = [line for line in pages.table("new", name).splitlines() if line.startswith("| ")]
    assert len(lines) >= 2 + len(result["rows"])
