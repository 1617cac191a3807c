"""Peak GPU memory of a step, eager and compiled."""

from __future__ import annotations

from collections import Counter

import torch

from compile_callbacks.phases import Phase

_MEASURED_STEPS = 5
"""Steps measured of each kind, the recording of a CUDA graph among them: reading the allocator's statistics takes
longer than a steady step should pay, and resets the peak that the user's own code may read."""


_Way = tuple[Phase, bool, str | None]


class PeakMemory:
    """Measures the first undisturbed steps of each phase, eager and compiled, and no more.

    The peak is that of the CUDA allocator on the current device, weights and optimizer state included. Under
    CUDA graphs it is that of the recording: a replay allocates nothing that the allocator sees.
    """

    def __init__(self) -> None:
        self._peak_bytes: dict[_Way, int] = {}
        self._measured: Counter[_Way] = Counter()
        self._running: _Way | None = None

    def start(self, phase: Phase, *, compiled: bool, settings: str | None = None) -> None:
        """A step begins on a GPU; ``settings``, what it is compiled with, where the phase has had several."""
        key = phase, compiled, settings
        self._running = key if self._measured[key] < _MEASURED_STEPS else None
        if self._running:
            torch.cuda.reset_peak_memory_stats()

    def stop(self, *, traced: bool) -> None:
        """The step ends; ``traced``, whether anything but a CUDA-graph recording compiled in it."""
        if self._running is None or traced:
            return
        key = self._running
        self._measured[key] += 1
        self._peak_bytes[key] = max(self._peak_bytes.get(key, 0), torch.cuda.max_memory_allocated())

    def forget(self, phase: Phase) -> None:
        """Measure a phase anew: its steps have come to do other work."""
        for of_ways in (self._peak_bytes, self._measured):
            for way in [way for way in of_ways if way[0] == phase]:
                del of_ways[way]

    def peak_mb(self, phase: Phase, *, compiled: bool, settings: str | None = None) -> float | None:
        """The peak in MiB, or ``None`` where none was measured."""
        peak = self._peak_bytes.get((phase, compiled, settings))
        return None if peak is None else peak / 2**20
