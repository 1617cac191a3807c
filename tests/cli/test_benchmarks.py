"""The scripts in ``benchmarks/``: one run, the tables of rows, and the imports of all scripts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def run(tmp_path):
    def run(*command):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{BENCHMARKS}", "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=True,
        ).stdout  # fmt: skip

    return run


@pytest.mark.slow
def test_benchmark_measures_every_way_and_writes_rows(run, tmp_path):
    file = tmp_path / "rows.json"
    options = """--model blocks-1 --phase train --batch-sizes 1 --ways eager '("default")' --device cpu --jobs 2
                 --steps 4 --blocks 2 --block-seconds 0 --prepare-steps 2 --json"""
    out = run(BENCHMARKS / "resnet50.py", *shlex.split(options), file)
    written = json.loads(file.read_text())
    assert list(written) == ["title", "date", "device", "versions", "command", "rows"]
    eager, compiled = written["rows"]
    assert [eager["way"], compiled["way"]] == ["eager", 'InductorCompile("default")']
    assert eager["failure"] is compiled["failure"] is None
    assert eager["samples"] == compiled["samples"] == 2
    assert compiled["speedup"] == eager["step_ms"] / compiled["step_ms"]
    assert eager["compile_seconds"] == 0
    assert 0 < compiled["compile_seconds"] < compiled["prepare_seconds"]
    assert compiled["graphs"] == 1
    assert run(BENCHMARKS / "resnet50.py", "--from-json", file) == out


@pytest.mark.slow
def test_every_benchmark_imports(run):
    modules = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    assert "warm_start" in modules
    run("-c", f"import {', '.join(modules)}")
