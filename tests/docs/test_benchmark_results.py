"""The files in benchmarks/results have the documented shape, and contain the figures of the benchmark pages."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "results"
RESULTS = sorted(FOLDER.glob("*.json"))
OF_MODELS = [path for path in RESULTS if path.stem.startswith("models_")]
COPIED = [path for path in RESULTS if path not in OF_MODELS]
FIELDS = re.findall(r"`(\w+)`", (FOLDER / "README.md").read_text())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_file_has_the_documented_shape(path):
    result = json.loads(path.read_text())
    packages = ["packages"] if path in OF_MODELS else []
    commit = ["commit"] if "commit" in result else []
    assert list(result) == ["title", *commit, "date", "device", "versions", "command", *packages, "rows"]
    assert result["title"]
    assert result["date"] is None or dt.date.fromisoformat(result["date"])
    assert isinstance(result["device"], str | None)
    assert list(result["versions"]) == ["python", "torch", "triton", "lightning"]
    assert all(isinstance(version, str | None) for version in result["versions"].values())
    assert result["command"].startswith(("python benchmarks/", "make ", "CUDA_VISIBLE_DEVICES="))
    assert result["rows"]
    for row in result["rows"]:
        assert list(row) == list(result["rows"][0])
        assert set(row) <= set(FIELDS)
        for name, value in row.items():
            if name.endswith(("_ms", "_seconds")):
                assert isinstance(value, int | float | None)
                assert value is None or value > 0 or (name.startswith(("spread", "exposed")) and value == 0)


@pytest.mark.parametrize("path", COPIED, ids=lambda path: path.stem)
def test_result_file_has_only_numbers_of_the_docs(path):
    text = "".join(page.read_text() for page in (ROOT / "docs" / "project").glob("benchmarks_*.md"))
    published = {float(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text)}
    rows = json.loads(path.read_text())["rows"]
    numbers = [value for row in rows for name, value in row.items() if name != "run" and isinstance(value, int | float)]
    assert numbers
    assert [number for number in numbers if number not in published] == []


def test_every_table_of_the_docs_has_a_result_file():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "project").glob("benchmarks_*.md"))
    tables = re.findall(r"^\|(?: --- \|)+\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    assert len([rows for rows in tables if re.search(r"\d\.\d", rows)]) == len(COPIED)


@pytest.mark.parametrize("names", [["models_after", "models_before"], ["models_inductor"]], ids=lambda names: names[0])
def test_tables_of_models_are_those_of_their_result_files(names, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    importlib.import_module("models_table").print_rows(*(FOLDER / f"{name}.json" for name in names))
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 10
    assert table in (ROOT / "docs" / "project" / "models_tried.md").read_text()


def test_generated_tables_are_those_of_their_result_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pages = importlib.import_module("pages")
    page = (ROOT / "docs" / "how_to" / "background.md").read_text()
    assert pages.SECTION.search(page)[3].strip() == pages.background().strip()
    monkeypatch.setattr("sys.argv", ["pages.py", "--check"])
    pages.main()
