"""The files in benchmarks/results have the documented shape, and the pages show their figures."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import re
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
