"""`PeakMemory`: measures the peak GPU memory of eager and compiled steps for the report."""

from __future__ import annotations

from collections import Counter

import torch

_MEASURED_STEPS = 5
"""Number of measured steps of each variant, including the recording of a CUDA graph. The number is small, because
reading the allocator's statistics in each step would take too long."""


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
        self._before: int | None = None  # the peak before the running step, if the step is measured

    def start(self, variant: str | None) -> None:
        """Start a step on a GPU."""
        self._before = torch.cuda.max_memory_allocated() if self._measured[variant] < _MEASURED_STEPS else None

    def stop(self, variant: str | None, *, traced: bool) -> None:
        """End the step."""
        if self._before is None or traced:
            return
        after = torch.cuda.max_memory_allocated()
        if after >= self._before:  # unless the user's code reset the peak in this step
            self._measured[variant] += 1
            self._peaks[variant] = max(self._peaks.get(variant, (False, 0)), (after > self._before, after))

    def peak_mib(self, variant: str | None = None, *, raised: bool = True) -> float | None:
        """Return the highest peak of the measured steps, or the peak of the process if no step ``raised`` it."""
        has_raised, peak = self._peaks.get(variant, (False, 0))
        return peak / 2**20 or None if has_raised == raised else None
