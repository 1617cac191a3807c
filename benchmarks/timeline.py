"""How long the GPU was busy, and how long it only reduced gradients, from a profile of a few training steps."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conduct import say
from trainer import synchronize

Interval = tuple[float, float]
WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of the trace; annotations on the GPU's rows are no work


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals in order that do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """The time in at least one of the intervals."""
    return sum(end - start for start, end in union(intervals))


def busy_times(events: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Milliseconds of a GPU's work in the events of a Chrome trace, summed over streams without counting time twice.

    Returns:
        ``compute_ms``: time in kernels and copies other than NCCL's. ``all_reduce_ms``: time in NCCL's kernels, which
        includes the time in which they wait for another rank. ``exposed_all_reduce_ms``: the part of it in which
        nothing else runs. All are ``None`` if the trace has no work of a GPU.
    """
    compute: list[Interval] = []
    collectives: list[Interval] = []
    for event in events:
        if event.get("ph") == "X" and str(event.get("cat", "")).lower() in WORK:
            start = float(event["ts"]) / 1000
            kind = collectives if "nccl" in str(event.get("name", "")).lower() else compute
            kind.append((start, start + float(event.get("dur", 0)) / 1000))
    if not compute:
        return dict.fromkeys(("compute_ms", "all_reduce_ms", "exposed_all_reduce_ms"))
    computing = length(compute)
    return {
        "compute_ms": computing,
        "all_reduce_ms": length(collectives),
        "exposed_all_reduce_ms": length(compute + collectives) - computing,
    }


class StepProfiler(pl.Callback):
    """Profiles the steps from ``first`` to the end of training; ``times`` has the milliseconds of one step.

    A failure of the profiler leaves ``times`` without values, and training continues.
    """

    def __init__(self, first: int) -> None:
        self.first, self.steps = first, 0
        self.times = busy_times([])
        self._profile: Any = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.first and pl_module.device.type == "cuda":
            self._carefully(self._start)
        self.steps += batch_idx >= self.first

    def on_train_end(self, trainer, pl_module):
        if self._profile is not None:
            self._carefully(self._stop)
            self._profile = None

    def _start(self) -> None:
        synchronize()
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profile.start()
        self._profile = profile

    def _stop(self) -> None:
        synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.export_chrome_trace(str(path))
            total = busy_times(json.loads(path.read_text())["traceEvents"])
        self.times = {name: value if value is None else value / self.steps for name, value in total.items()}

    def _carefully(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            say(f"no profile: {error!r}")
