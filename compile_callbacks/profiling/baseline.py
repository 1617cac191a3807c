"""`Baseline`: the number of eager steps that `Session` runs in a phase before it runs compiled ones."""

from __future__ import annotations

import math
from typing import Any

from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from compile_callbacks.profiling.workload import Workload


class Baseline:
    """Counts the eager steps of one phase.

    They continue over several stage runs if necessary, and take at most half of the steps of the run. A run that is
    too short for a baseline is compiled from its first step.

    Args:
        steps: Number of samples; 0 for no baseline.
    """

    def __init__(self, steps: int) -> None:
        self._wanted = steps
        self._samples = self._steps = 0
        self._max_steps: float = 0
        self._planned_for: float | None = None

    def plan(self, remaining_steps: float) -> None:
        """Plan for the remaining steps of the phase; ``math.inf`` if unknown. The first finite number counts."""
        if self._wanted == 0 or (self._planned_for is not None and math.isfinite(self._planned_for)):
            return
        self._planned_for = remaining_steps + self._steps
        half = math.inf if math.isinf(remaining_steps) else self._planned_for // 2
        self._wanted = int(min(self._wanted, half - WARMUP_STEPS))
        # Twice as many steps as samples, because some steps are not samples (a ragged batch, a compile by the user).
        self._max_steps = min(2 * self._wanted + WARMUP_STEPS, half) if self._wanted > 0 else 0

    def skip(self) -> None:
        """Run no eager steps, because an earlier run measured the baseline."""
        self._planned_for = self._max_steps = 0

    @property
    def running(self) -> bool:
        """Whether the next step runs eagerly."""
        return self._samples < self._wanted and self._steps < self._max_steps

    def step(self, *, sample: bool) -> None:
        """Count an eager step."""
        self._steps += 1
        self._samples += sample


def baseline_from_data(data: Any) -> dict[Workload, tuple[float, ...]]:
    """Return the samples by workload, from pairs of lists; nothing if the data has another form."""
    try:
        found = {Workload.from_data(workload): tuple(map(float, samples)) for workload, samples in data}
    except (TypeError, ValueError, OverflowError):
        return {}
    return found if all(0 < sample < math.inf for samples in found.values() for sample in samples) else {}
