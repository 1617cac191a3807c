"""``compile-callbacks bench``: rows, JSON, failures, and wrong arguments."""

from __future__ import annotations

import json
import sys

import pytest

from compile_callbacks.cli import main

SUBJECTS = "tests.support.bench_subjects"


@pytest.fixture
def bench(capsys):
    def bench(*args, status=0):
        assert main(["bench", *args, "--device", "cpu"]) == status
        return capsys.readouterr()

    return bench


def test_bench_measures_modes_side_by_side(bench):
    modes = ["default", '{"options": {"epilogue_fusion": false}}']
    printed = bench(f"{SUBJECTS}:classifier", "--modes", *modes, "--phase", "both", "--steps", "5", "--json")
    result = json.loads(printed.out)
    assert list(result) == ["title", "date", "device", "versions", "command", "rows"]
    rows = {(row["phase"], row["mode"]): row for row in result["rows"]}
    assert list(rows) == [(phase, mode) for phase in ("train", "infer") for mode in ("eager", *modes)]
    for (_, mode), row in rows.items():
        assert row["failure"] is None
        assert row["step_ms"] > 0
        assert row["samples"] <= 5
        if mode != "eager":
            assert row["verified"] == ["equal"]
            assert row["compile_seconds"] > 0
            assert row["graphs"] == 1
            assert row["notes"] == []


def test_bench_shows_a_failed_mode_with_its_reason(bench):
    modes = ["default", '{"fullgraph": true}']
    printed = bench(f"{SUBJECTS}:breaks", "--modes", *modes, "--steps", "2", "--json", status=1)
    rows = {row["mode"]: row for row in json.loads(printed.out)["rows"]}
    assert rows["default"]["failure"] is None
    assert rows["default"]["graph_breaks"] == 1
    assert "graph break" in rows[modes[1]]["failure"].lower().replace("_", " ")


def test_bench_notes_settings_without_effect(bench):
    printed = bench(f"{SUBJECTS}:dropout", "--modes", "reduce-overhead", "--phase", "train", "--json")
    _, row = json.loads(printed.out)["rows"]
    assert row["notes"] == ["CUDA graphs have no effect without a GPU", "not compared: dropout"]
    assert row["verified"] == ["not compared"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["resnet18"], "must have the form package:factory"),
        ([f"{SUBJECTS}:clasifier"], "did you mean 'classifier'"),
        ([f"{SUBJECTS}:images"], "--input 4x3x224x224"),
        ([f"{SUBJECTS}:classifier", "--modes", "max-autotun"], "did you mean 'max-autotune'"),
        ([f"{SUBJECTS}:classifier", "--modes", "{bad"], "is not valid JSON"),
        ([f"{SUBJECTS}:classifier", "--input", "4x8"], "has no effect"),
        ([f"{SUBJECTS}:classifier", "--steps", "0"], "--steps=0 must be 1 or more"),
        ([f"{SUBJECTS}:classifier", "--precision", "fp8"], "--precision='fp8'"),
    ],
)
def test_bench_refuses_a_wrong_argument_in_one_line(args, message, bench):
    printed = bench(*args, status=2)
    assert message in printed.err
    assert printed.err.splitlines()[-1].startswith("compile-callbacks bench: ")
    assert printed.out == ""


def test_bench_prefers_an_installed_package_to_the_current_directory(bench, tmp_path, monkeypatch):
    factory = "from tests.support.bench_subjects import classifier\n"
    installed, current = tmp_path / "site-packages", tmp_path / "current"
    for folder in (installed, current):
        folder.mkdir()
    (installed / "bench_installed.py").write_text(factory)
    (current / "bench_installed.py").write_text("raise RuntimeError('the planted module was imported')\n")
    (current / "bench_local.py").write_text(factory)
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    monkeypatch.chdir(current)
    for package in ("bench_installed", "bench_local"):
        bench(f"{package}:classifier", "--steps", "1", "--modes", "eager")
        assert sys.modules.pop(package)
