"""The clock of all step times, which tests replace. `Span` measures a step."""

from __future__ import annotations

import time
from typing import Any

import torch

seconds = time.perf_counter
"""Returns the time in seconds. Untimed steps call it directly, because a Python function takes longer."""


def now(device: torch.device | None = None, **step: Any) -> Any:
    """Return the time in seconds, or for an accelerator an event that it has recorded.

    At the end of a step, ``step`` has its ``start``, ``phase``, ``candidate`` and ``workload``, for tests.
    """
    # torch.cuda, torch.xpu and torch.mps have an Event class.
    accelerator = None if device is None or device.type == "cpu" else getattr(torch, device.type, None)
    if (event_class := getattr(accelerator, "Event", None)) is None:
        return seconds()
    event = event_class(enable_timing=True)
    event.record()
    return event


class Span:
    """The time between two points of a step. An accelerator measures the time by events, without a synchronization."""

    def __init__(self, device: torch.device | None = None, start: Any = None) -> None:
        self._device = device
        self._start = now(device) if start is None else start
        self._end: Any = None

    def stop(self, **step: Any) -> None:
        """End the span. ``step`` describes the step for `now`."""
        self._end = now(self._device, start=self._start, **step)

    def passed(self) -> bool:
        """Return whether the device has passed the end."""
        return isinstance(self._end, float) or bool(self._end.query())

    def milliseconds(self) -> float:
        """Wait until the device has passed the end, and return the time."""
        if isinstance(self._end, float):
            return float(self._end - self._start) * 1000
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))
