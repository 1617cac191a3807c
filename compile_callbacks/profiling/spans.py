"""`Span` measures the time of a step, and `call_times_ms` the times of single calls, on a CPU or an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from compile_callbacks.profiling import clock

_WARMUP_CALLS, _TIMED_CALLS, _MAX_SECONDS = 2, 50, 10


class Span:
    """The time between two points of a step. An accelerator measures the time by events, without a synchronization."""

    def __init__(self, device: torch.device | None = None, start: Any = None) -> None:
        self._device = device
        self._start = clock.now(device) if start is None else start
        self._end: Any = None

    def stop(self, **step: Any) -> None:
        """End the span. ``step`` describes the step for `clock.now`."""
        self._end = clock.now(self._device, start=self._start, **step)

    def passed(self) -> bool:
        """Return whether the device has passed the end."""
        return isinstance(self._end, float) or bool(self._end.query())

    def milliseconds(self) -> float:
        """Wait until the device has passed the end, and return the time."""
        if isinstance(self._end, float):
            return float(self._end - self._start) * 1000
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))


def call_times_ms(call: Callable[[], object], *, device: torch.device) -> tuple[float, ...]:
    """Time calls one by one, with a synchronization after each."""
    milliseconds: list[float] = []
    deadline = time.perf_counter() + _MAX_SECONDS
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    for number in range(_WARMUP_CALLS + _TIMED_CALLS):
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        end = time.perf_counter()
        if number >= _WARMUP_CALLS:
            milliseconds.append((end - start) * 1000)
            if end > deadline:
                break
    return tuple(milliseconds)
