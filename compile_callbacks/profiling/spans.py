"""`Span` measures the time of a step, and `call_times_ms` the times of single calls, on a CPU or an accelerator."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

_WARMUP_CALLS, _TIMED_CALLS, _MAX_SECONDS = 2, 50, 10


class Span:
    """The time between two points of a step. An accelerator measures the time by events, without a synchronization."""

    def __init__(
        self,
        device: torch.device | None = None,
        clock: Callable[[], float] = time.perf_counter,
        start: float | None = None,
    ) -> None:
        # torch.cuda, torch.xpu and torch.mps have an Event class.
        accelerator = None if device is None or device.type == "cpu" else getattr(torch, device.type, None)
        self._event = getattr(accelerator, "Event", None)
        self._mark = clock if self._event is None else self._record_event
        self._start: Any = self._mark() if start is None else start
        self._end: Any = None

    def stop(self) -> None:
        """End the span."""
        self._end = self._mark()

    def passed(self) -> bool:
        """Return whether the device has passed the end."""
        return self._event is None or bool(self._end.query())

    def milliseconds(self) -> float:
        """Wait until the device has passed the end, and return the time."""
        if self._event is None:
            return float((self._end - self._start) * 1000)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def _record_event(self) -> Any:
        event: Any = self._event(enable_timing=True)  # type: ignore[misc]
        event.record()
        return event


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
