"""The clock of all step times, which tests replace."""

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
