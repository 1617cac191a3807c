"""The scripts in ``benchmarks/``: a run of one as a command, and tables of rows."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.newest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def run(tmp_path):
    def run(script, *options):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        return subprocess.run(
            [sys.executable, str(BENCHMARKS / script), *map(str, options)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=True,
        ).stdout  # fmt: skip

    return run


def row(way, step_ms, **others):
    work = {"model": "resnet18", "phase": "train", "batch_size": 16, "trials": [], "chosen": None, "failure": None}
    return work | {"way": way, "step_ms": step_ms, "environment": {"device": "a device", "torch": "2"}} | others


def test_a_benchmark_measures_every_way_and_writes_rows(run, tmp_path):
    file = tmp_path / "rows.json"
    options = """--model blocks-1 --phase train --batch-sizes 1 --ways eager '("default")' --device cpu --jobs 2
                 --steps 4 --blocks 2 --block-seconds 0 --prepare-steps 2 --json"""
    out = run("resnet50.py", *shlex.split(options), file)
    eager, compiled = json.loads(file.read_text())["rows"]
    assert [eager["way"], compiled["way"]] == ["eager", 'InductorCompile("default")']
    assert eager["failure"] is compiled["failure"] is None
    assert eager["step_ms"] > 0
    assert compiled["step_ms"] > 0
    assert eager["blocks"] == compiled["blocks"] == 2
    assert eager["compile_seconds"] == 0
    assert 0 < compiled["compile_seconds"] < compiled["prepare_seconds"]
    assert compiled["graphs"] == 1
    assert f"| {eager['step_ms']:.2f} |  |" in out or f"| {eager['step_ms']:.3f} |  |" in out


def test_the_zoo_tells_the_geometric_mean_and_the_worst(run, tmp_path):
    file = tmp_path / "rows.json"
    rows = [row("eager", 8.0), row("torch.compile", 4.0), row("auto", 2.0, chosen="reduce-overhead")]
    rows += [row("eager", 1.0, model="vit"), row("torch.compile", 2.0, model="vit"), row("auto", 1.0, model="vit")]
    rows += [row("eager", 1.0, model="bad"), row("torch.compile", 2.0, model="bad"), row("auto", None, model="bad")]
    file.write_text(json.dumps({"rows": rows}))
    out = run("zoo.py", "--from-json", file)
    assert "| resnet18 | 8.00 | 4.00 | 2.00 | reduce-overhead | 4.00× | 2.00× | 2.00× |" in out
    assert "| bad | 1.00 | 2.00 | failed | nothing |  |  | 0.50× |" in out
    assert "| geometric mean of 2 |  |  |  |  | 2.00× | 2.00× | 1.00× |" in out
    assert "| worst |  |  |  |  | 1.00× | 2.00× | 0.50× |" in out
    assert "a device, torch 2" in out


def test_resnet50_tells_how_far_auto_is_from_the_best(run, tmp_path):
    files = [tmp_path / "16.json", tmp_path / "128.json"]
    trials = [{"candidate": "eager", "verdict": "beaten", "median_ms": 18.0}]
    auto = row('InductorCompile("auto")', 5.0, chosen="reduce-overhead", trials=trials, prepare_seconds=60.0)
    files[0].write_text(json.dumps({"rows": [row("eager", 18.0), row("child", 4.0), auto]}))
    files[1].write_text(json.dumps({"rows": [row("eager", 30.0, batch_size=128)]}))
    out = run("resnet50.py", "--from-json", *files)
    assert "| train | batch 16 | of eager | batch 128 | of eager |" in out
    assert "| eager | 18.00 |  | 30.00 |  |" in out
    assert '| InductorCompile("auto") | 5.00 | 3.60× |  |  |' in out
    assert "| 16 | reduce-overhead | eager beaten 18.00 ms | 60 s | child | 1.250 |" in out
