"""`PeakMemory`: measures the peak GPU memory of eager and compiled steps for the report."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from compile_callbacks._utils.phases import Phase

_MEASURED_STEPS = 5
"""Number of measured steps of each variant, including the recording of a CUDA graph. The number is small, because
reading the allocator's statistics in each step would take too long."""

_Key = tuple[Phase, str | None]  # the phase, and the name of the variant


class Peak(NamedTuple):
    """The peak memory of a step, or an upper bound for it."""

    mib: float | None = None
    at_most_mib: float | None = None  # the peak of the process, if the step did not raise it


class PeakMemory:
    """Measures the first undisturbed steps of each phase, eager and compiled.

    The peak is the memory of the CUDA allocator on the current device, including weights and optimizer state. The peak
    of a step is known only if the step raises the peak of the process. This class does not reset the process's peak,
    because the user's own code may read it. With CUDA graphs, the class measures the recording, because a replay
    allocates no memory.
    """

    def __init__(self) -> None:
        self._peaks: dict[_Key, tuple[bool, int]] = {}  # whether a step raised the process's peak, and the peak
        self._measured: Counter[_Key] = Counter()
        self._running: tuple[_Key, int] | None = None

    def start(self, phase: Phase, variant: str | None) -> None:
        """Start a step on a GPU."""
        key = phase, variant
        measured = self._measured[key] < _MEASURED_STEPS
        self._running = (key, torch.cuda.max_memory_allocated()) if measured else None

    def stop(self, *, traced: bool) -> None:
        """End the step."""
        running, self._running = self._running, None
        if running is None or traced:
            return
        key, before = running
        after = torch.cuda.max_memory_allocated()
        if after < before:  # because the user's code reset the peak in this step
            return
        self._measured[key] += 1
        self._peaks[key] = max(self._peaks.get(key, (False, 0)), (after > before, after))

    def peak(self, phase: Phase, variant: str | None = None) -> Peak:
        """Return the highest peak of the measured steps."""
        raised, peak_bytes = self._peaks.get((phase, variant), (False, 0))
        mib = peak_bytes / 2**20 or None
        return Peak(mib=mib) if raised else Peak(at_most_mib=mib)
