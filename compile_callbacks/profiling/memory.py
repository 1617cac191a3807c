"""Peak GPU memory of a step, eager and compiled."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from compile_callbacks._utils.phases import Phase

_MEASURED_STEPS = 5
"""Steps measured of each kind, including the recording of a CUDA graph. Reading the allocator's statistics takes too
long to do it in every step."""

_Way = tuple[Phase, bool, str | None]


class Peak(NamedTuple):
    """The peak memory of a step, or an upper bound for it.

    Attributes:
        mib: The peak in MiB; ``None`` if it was not measured.
        at_most_mib: If the step did not raise the process's peak: that peak, in MiB.
    """

    mib: float | None = None
    at_most_mib: float | None = None


class PeakMemory:
    """Measures the first undisturbed steps of each phase, eager and compiled, and no more.

    The peak is that of the CUDA allocator on the current device, including weights and optimizer state. It is known
    only if a step raises the process's peak: the peak is not reset, because the user's own code may read it. With CUDA
    graphs the peak is that of the recording, because the allocator sees no allocation in a replay.
    """

    def __init__(self) -> None:
        self._peak_bytes: dict[_Way, int] = {}
        self._at_most_bytes: dict[_Way, int] = {}
        self._measured: Counter[_Way] = Counter()
        self._running: tuple[_Way, int] | None = None

    def start(self, phase: Phase, *, compiled: bool, candidate: str | None = None) -> None:
        """A step begins on a GPU.

        Args:
            phase: Its phase.
            compiled: Whether it runs compiled.
            candidate: The candidate, if the phase is tuned.
        """
        way = phase, compiled, candidate
        self._running = (way, torch.cuda.max_memory_allocated()) if self._measured[way] < _MEASURED_STEPS else None

    def stop(self, *, traced: bool) -> None:
        """The step ends.

        Args:
            traced: Whether anything except a CUDA graph recording compiled in it.
        """
        running, self._running = self._running, None
        if running is None or traced:
            return
        way, before = running
        after = torch.cuda.max_memory_allocated()
        if after < before:  # the user has reset the peak in this step
            return
        self._measured[way] += 1
        found = self._peak_bytes if after > before else self._at_most_bytes
        found[way] = max(found.get(way, 0), after)

    def peak(self, phase: Phase, *, compiled: bool, candidate: str | None = None) -> Peak:
        """The highest peak of the measured steps."""
        way = phase, compiled, candidate
        if (peak := self._peak_bytes.get(way)) is not None:
            return Peak(mib=peak / 2**20)
        at_most = self._at_most_bytes.get(way)
        return Peak(at_most_mib=None if at_most is None else at_most / 2**20)
