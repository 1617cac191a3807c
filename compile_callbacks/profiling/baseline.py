"""How many steps of a phase run eagerly first, to measure what compiling is compared with."""

from __future__ import annotations

import math

from compile_callbacks.profiling.step_timer import WARMUP_STEPS


class Baseline:
    """Counts the eager steps of one phase.

    They go on over as many stage runs as they need, but take no more than half of the steps that are known to
    come: a run too short for a baseline is compiled from its first step.

    Args:
        steps: Samples wanted; 0 for no baseline.
    """

    def __init__(self, steps: int) -> None:
        self._wanted = steps
        self._samples = self._steps = 0
        self._most: float = 0
        self._planned_for: float | None = None

    def plan(self, remaining_steps: float) -> None:
        """So many steps of the phase are to come, ``math.inf`` where that is not known; the first number counts."""
        if self._wanted == 0 or (self._planned_for is not None and math.isfinite(self._planned_for)):
            return
        self._planned_for = remaining_steps + self._steps
        room = math.inf if math.isinf(remaining_steps) else self._planned_for // 2
        self._wanted = int(min(self._wanted, room - WARMUP_STEPS))
        # Twice what is needed, for steps that turn out not to be samples (a ragged batch, another's compile).
        self._most = min(2 * self._wanted + WARMUP_STEPS, room) if self._wanted > 0 else 0

    def skip(self) -> None:
        """No eager steps: a baseline is known from before."""
        self._planned_for = self._most = 0

    @property
    def running(self) -> bool:
        """Whether the next step is to run eagerly."""
        return self._samples < self._wanted and self._steps < self._most

    def step(self, *, sample: bool) -> None:
        """An eager step is done."""
        self._steps += 1
        self._samples += sample
