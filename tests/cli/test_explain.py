"""``compile-callbacks explain``: each code that the package uses has an entry, and each entry is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import compile_callbacks
from compile_callbacks.cli.explain import EXPLANATIONS, read_entries
from compile_callbacks.cli.main import main


def test_explain_prints_the_entry_of_a_code(capsys):
    assert main(["explain", "cc104"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CC104: A target cannot be compiled\n\nWhat happened. ")
    assert printed.count("\n\n") == 3


@pytest.mark.parametrize(("code", "hint"), [("CC1044", "codes near it: CC104"), ("slow", "lists all codes")])
def test_explain_refuses_an_unknown_code(code, hint, capsys):
    assert main(["explain", code]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted(EXPLANATIONS.glob("*.md")), ids=lambda file: file.name)
def test_every_entry_has_its_three_paragraphs(file):
    entries = [entry for entry in read_entries().values() if entry.code[2] == file.name[0]]
    assert re.findall(r"^## (.*)", file.read_text(), re.MULTILINE) == [f"{e.code}: {e.title}" for e in entries]
    assert sorted(entry.code for entry in entries) == [entry.code for entry in entries]
    for entry in entries:
        paragraphs = [paragraph.partition(".**")[0] for paragraph in entry.text.split("\n\n")]
        assert paragraphs == ["**What happened", "**Why", "**What to do"], entry.code


def test_every_code_of_the_package_has_an_entry_and_every_entry_a_code():
    package = Path(compile_callbacks.__file__).parent
    used = {code for file in package.rglob("*.py") for code in re.findall(r'"(CC\d{3})"', file.read_text())}
    assert used == set(read_entries())
