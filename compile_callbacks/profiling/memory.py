"""`PeakMemory`: measures the peak GPU memory of eager and compiled steps for the report."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

_MEASURED_STEPS = 5
"""Number of measured steps of each variant, including the recording of a CUDA graph. The number is small, because
reading the allocator's statistics in each step would take too long."""


class Peak(NamedTuple):
    """The peak memory of a step, or an upper bound for it."""

    mib: float | None = None
    at_most_mib: float | None = None  # the peak of the process, if the step did not raise it


class PeakMemory:
    """Measures the first undisturbed steps of each variant of a phase.

    The peak is the memory of the CUDA allocator on the current device, including weights and optimizer state. The peak
    of a step is known only if the step raises the peak of the process. This class does not reset the process's peak,
    because the user's own code may read it. With CUDA graphs, the class measures the recording, because a replay
    allocates no memory.
    """

    def __init__(self) -> None:
        self._peaks: dict[str | None, tuple[bool, int]] = {}  # whether a step raised the process's peak, and the peak
        self._measured: Counter[str | None] = Counter()
        self._running: tuple[str | None, int] | None = None

    def start(self, variant: str | None) -> None:
        """Start a step on a GPU."""
        measured = self._measured[variant] < _MEASURED_STEPS
        self._running = (variant, torch.cuda.max_memory_allocated()) if measured else None

    def stop(self, *, traced: bool) -> None:
        """End the step."""
        running, self._running = self._running, None
        if running is None or traced:
            return
        variant, before = running
        after = torch.cuda.max_memory_allocated()
        if after < before:  # because the user's code reset the peak in this step
            return
        self._measured[variant] += 1
        self._peaks[variant] = max(self._peaks.get(variant, (False, 0)), (after > before, after))

    def peak(self, variant: str | None = None) -> Peak:
        """Return the highest peak of the measured steps."""
        raised, peak_bytes = self._peaks.get(variant, (False, 0))
        mib = peak_bytes / 2**20 or None
        return Peak(mib=mib) if raised else Peak(at_most_mib=mib)
