"""`benchmarks/bench_measure.py`: the rows of modes, of a mode that fails, and of settings without effect."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_callbacks import InductorConfig
from tests.support.models import FEATURES, Wrapper, mlp

pytestmark = pytest.mark.usefixtures("no_codegen")


class Breaks(Wrapper):
    """A graph break, which ``fullgraph`` refuses."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return self.net(x)


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    bench = importlib.import_module("bench_measure")

    def rows(module, phase, **configs):
        benchmarked = bench.BenchmarkedModule("net", torch.device("cpu"), module, (torch.randn(4, FEATURES),))
        return {row["mode"]: row for row in bench.measure(benchmarked, configs, phase, steps=5)}

    return rows


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_measure_times_modes_side_by_side(rows, phase):
    found = rows(mlp(), phase, default=InductorConfig(), unfused=InductorConfig(options={"epilogue_fusion": False}))
    assert list(found) == ["eager", "default", "unfused"]
    for mode, row in found.items():
        assert row["failure"] is None
        assert row["step_ms"] > 0
        assert row["samples"] <= 5
        if mode != "eager":
            assert row["verified"] == ["equal"]
            assert row["compile_seconds"] > 0
            assert row["graphs"] == 1
            assert row["notes"] == []


def test_measure_gives_the_reason_of_a_mode_that_fails(rows):
    found = rows(Breaks(), "infer", default=InductorConfig(), full=InductorConfig(fullgraph=True))
    assert found["default"]["failure"] is None
    assert found["default"]["graph_breaks"] == 1
    assert "graph break" in found["full"]["failure"].lower().replace("_", " ")


def test_measure_notes_settings_without_effect(rows):
    module = nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(), nn.Linear(16, 3))
    row = rows(module, "train", graphs=InductorConfig(mode="reduce-overhead"))["graphs"]
    assert row["notes"] == ["CUDA graphs have no effect without a GPU", "not compared: dropout"]
    assert row["verified"] == ["not compared"]
