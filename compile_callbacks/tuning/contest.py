"""`Contest`: decides which variant each step of a phase runs, by blocks of steps that run after each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling.clock import Span
from compile_callbacks.profiling.comparison import compare
from compile_callbacks.profiling.step_times import WARMUP_STEPS, Step, Workload
from compile_callbacks.tuning.candidates import Trial

BLOCK_SAMPLES = 10
"""The number of samples in a block that compares a config with eager. With few samples, a block ends after four times
as many steps."""

ROUNDS = 3
"""The number of rounds, of a block of compiled steps and a block of eager steps, with ``background=True``."""


@dataclass
class Block:
    """Steps with one variant, which end after a number of samples or of steps."""

    wanted: float = BLOCK_SAMPLES
    limit: float = 4 * BLOCK_SAMPLES
    steps: int = 0
    samples: list[tuple[Workload, Span]] = field(default_factory=list)
    workloads: Counter[Workload] = field(default_factory=Counter)  # of all timed steps

    @property
    def is_over(self) -> bool:
        """Whether the block has enough samples or steps."""
        return len(self.samples) >= self.wanted or self.steps >= self.limit

    def add(self, step: Step) -> None:
        """Add a timed step."""
        self.steps += 1
        if step.workload is not None and step.span is not None:
            self.workloads[step.workload] += 1
            if step.is_sample:
                self.samples.append((step.workload, step.span))


class Contest:
    """Runs the first steps of a phase eagerly, and the others with the phase's only config.

    The times of the eager steps are the baseline of the speedup. If one stage has too few steps, the eager steps
    continue in later stages. They take at most half of the steps of the run. If the run is too short for a baseline, it
    runs compiled from its first step.

    If the contest ``compares``, blocks of compiled steps and of eager steps alternate after the baseline, and the phase
    goes back to eager if the compiled steps are slower by the rule of `compare`.

    Args:
        variant: The config.
        baseline_steps: The wanted number of eager samples.
        waits: Returns what steps run while a variant waits for its code, or ``None`` if it does not wait.
        compares: Returns whether to compare.
        sent_back: Gets the reason if the phase goes back to eager.
    """

    def __init__(
        self,
        variant: Variant,
        baseline_steps: int = 0,
        *,
        waits: Callable[[Variant], Variant | None] | None = None,
        compares: Callable[[], bool] = lambda: False,
        sent_back: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.steps_left = math.inf
        """The steps of the phase that remain in the run, at the start of the stage."""
        self.winner: Trial | None = None
        self._eager, self._candidate = Trial(EAGER_VARIANT), Trial(variant)
        self._turns = [self._eager]  # the trials of the next blocks
        self._block = Block(wanted=baseline_steps, limit=math.inf)
        self._planned_for: float | None = None
        self._waits, self._compares, self._sent_back = waits, compares, sent_back

    @property
    def chosen(self) -> Variant | None:
        """The variant of the phase after its eager steps, or ``None`` if it is not known yet."""
        return (self.winner or self._candidate).variant

    @property
    def alive(self) -> frozenset[str | None]:
        """The names of the variants that may still run."""
        return frozenset({(self.winner or self._candidate).variant.name})

    @property
    def reported(self) -> list[Trial]:
        """The trials that the report lists."""
        return []

    def begin(self, conditions: Any) -> None:
        """Begin a Trainer run."""

    def stage_ends(self) -> None:
        """End a stage on all ranks."""

    def plan(self, steps_left: float) -> None:
        """Plan for the remaining steps of the phase, ``math.inf`` if unknown. Only the first finite number counts."""
        self.steps_left = steps_left
        is_baseline = self._turns == [self._eager] and not self._eager.blocks
        if is_baseline and (self._planned_for is None or math.isinf(self._planned_for)):
            block = self._block
            self._planned_for = steps_left + block.steps
            half = math.inf if math.isinf(steps_left) else self._planned_for // 2
            block.wanted = min(block.wanted, half - WARMUP_STEPS)
            # Twice the number of samples, because a step with a smaller batch, or a compile of the user's code, gives
            # no sample.
            block.limit = min(2 * block.wanted + WARMUP_STEPS, half)
            if block.is_over:
                self._block_ends()

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether the step must be timed. A repeated call returns the same.

        If the step need not be timed, the caller may only count it, and not call `done`.
        """
        variant = (self.winner or self._turns[0]).variant
        waiting = None if variant.config is None or self._waits is None else self._waits(variant)
        return (variant, self.winner is None) if waiting is None else (waiting, False)

    def done(self, step: Step) -> bool:
        """End a step without a winner. Return whether a block has ended, so that `alive` may have changed."""
        if step.variant is not self._turns[0].variant:
            return False
        self._block.add(step)
        if is_over := self._block.is_over:
            self._block_ends()
        return is_over

    def _block_ends(self) -> None:
        trial = self._turns.pop(0)
        if self._turns or trial.blocks:
            trial.blocks.append([span.milliseconds() for _, span in self._block.samples])
        elif self._compares():  # the baseline ended
            self._turns = [self._candidate, self._eager] * ROUNDS
        self._block = Block()
        if not self._turns:
            self._compare()

    def _compare(self) -> None:
        eager, candidate = self._eager, self._candidate
        comparison = compare(eager.blocks, candidate.blocks)
        self.winner = candidate
        if comparison is not None and comparison.outcome == "slower":
            of = f"{eager.median_ms or 0.0:.2f} → {candidate.median_ms or 0.0:.2f} ms"
            self._sent_back(f"compiled steps were slower in alternating blocks ({of})")
            self.winner = eager
