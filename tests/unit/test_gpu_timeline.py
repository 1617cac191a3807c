"""Busy time and exposed all-reduces of a GPU, from the events of a profile that the test writes."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def timeline(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("timeline")


def event(name, start_us, duration_us, category="kernel"):
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": duration_us}


def test_time_that_intervals_share_counts_once(timeline):
    assert timeline.union([(5, 7), (0, 2), (1, 3), (3, 4), (9, 9)]) == [(0, 4), (5, 7)]
    assert timeline.length([(0, 10), (2, 3), (4, 12)]) == 12
    assert timeline.length([]) == 0


def test_an_all_reduce_is_exposed_where_no_other_kernel_runs(timeline):
    events = [
        event("triton_poi_fused", 0, 4000),
        event("void cudnn::conv", 3000, 2000),  # on another stream
        event("Memcpy DtoD", 6000, 1000, "gpu_memcpy"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 4000, 5000),  # 5 to 6 and 7 to 9 are exposed
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", 12000, 1000),
        event("nccl:all_reduce", 4000, 9000, "gpu_user_annotation"),
        event("aten::conv2d", 0, 20000, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    expected = {"compute_ms": 6.0, "all_reduce_ms": 6.0, "exposed_all_reduce_ms": 4.0}
    assert timeline.busy_times(events) == pytest.approx(expected)


def test_a_trace_without_a_gpu_has_no_times(timeline):
    assert set(timeline.busy_times([event("aten::add", 0, 5, "cpu_op")]).values()) == {None}
