"""The pages show the figures of the files in benchmarks/results."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("pages")


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
