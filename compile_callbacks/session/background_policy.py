"""`BackgroundPolicy`: runs eager steps until a helper process has compiled a variant, and again if it is slower."""

from __future__ import annotations

from collections.abc import Callable

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import EAGER_VARIANT, WAITING_VARIANT, Variant
from compile_callbacks.graphs.requests import RequestQueue
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare, median_ms
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_timer import StepTimer
from compile_callbacks.profiling.steps import Step
from compile_callbacks.tuning.ranks import Ranks

LEAST_SECONDS = 60.0
"""The duration of the rest of a run for which a compile is requested, unless an earlier run recorded its duration."""

BLOCKS = 6
"""The number of blocks that a comparison alternates between eager and compiled."""

BLOCK_SAMPLES = 10
"""The number of samples in a block. With few samples, a block ends after four times as many steps."""


class BackgroundPolicy:
    """Requests a variant, waits for it, and runs it. Goes back to eager if a comparison shows that it is slower.

    The policy compares only if compiled steps look slower than the eager baseline: after `BLOCK_SAMPLES` samples, and
    again each time the number of steps has quadrupled. The comparison alternates blocks of eager and of compiled steps
    at the same time of the run, and uses the one rule of `compare`. With several ranks, the policy compares nothing.
    """

    def __init__(
        self,
        phase: Phase,
        variant: Variant,
        requests: RequestQueue,
        timer: StepTimer,
        record: Callable[[str, str], None],
        known_seconds: Callable[[], float],
        ranks: Ranks,
    ) -> None:
        self.variant = variant
        self.steps_left = float("inf")
        """The number of the remaining steps of the phase at the start of the stage."""
        self._phase = phase
        self._requests = requests
        self._timer = timer
        self._record = record
        self._known_seconds = known_seconds
        self._ranks = ranks
        self._captured = self._ready = self._is_short = False
        self._next_look = BLOCK_SAMPLES
        self._block_steps = 0
        self._blocks: list[list[Span]] | None = None  # of the running comparison, eager and compiled in turn

    def next(self) -> tuple[Variant, bool]:
        """Return the variant of the next step, and whether the step must be timed."""
        if self._blocks is not None:
            return (EAGER_VARIANT if len(self._blocks) % 2 else self.variant), True
        if self._ready:
            return self.variant, False
        if self._requests.failure is not None:
            return EAGER_VARIANT, False
        if self._captured:
            self._ready = not self._requests.waits(self._phase, self.variant.name)
            return (self.variant if self._ready else WAITING_VARIANT), False
        return (EAGER_VARIANT if self._is_too_short() else self.variant), False

    def done(self, step: Step) -> None:
        """End a step: note a capture, look for slower steps, or continue a comparison."""
        self._captured |= step.variant is self.variant and (step.compiling or step.kind != "eager")
        if self._blocks is not None:
            self._continue(step)
        # Each step takes as long as that of the slowest rank, so a rank cannot decide by its own times.
        elif self._ready and step.kind != "eager" and self._ranks.size == 1:
            steps = self._timer.steps(self._phase, self.variant.name)
            if steps.total() - steps["eager"] >= self._next_look and self._looks_slower():
                self._blocks = [[]]

    def _is_too_short(self) -> bool:
        """Return whether the rest of the run is too short to repay a compile, and record it once."""
        eager_ms = median_ms(self._timer.times(self._phase).eager_ms)
        seconds = self.steps_left * eager_ms / 1000 if eager_ms else float("inf")
        is_short = seconds < (2 * self._known_seconds() or LEAST_SECONDS)
        if is_short and not self._is_short:
            reason = f"the rest of the run is too short to repay a compile (about {seconds:.0f} s)"
            self._record("not_requested", reason)
        self._is_short = is_short
        return is_short

    def _looks_slower(self) -> bool:
        times = self._timer.times(self._phase, self.variant.name)
        eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
        if compiled_ms is None or len(times.compiled_ms) < MIN_SAMPLES:
            return False
        self._next_look *= 4
        return eager_ms is not None and compiled_ms > eager_ms

    def _continue(self, step: Step) -> None:
        assert self._blocks is not None
        self._block_steps += 1
        if step.is_sample and step.span is not None:
            self._blocks[-1].append(step.span)
        if len(self._blocks[-1]) < BLOCK_SAMPLES and self._block_steps < 4 * BLOCK_SAMPLES:
            return
        self._block_steps = 0
        if len(self._blocks) < BLOCKS:
            self._blocks.append([])
            return
        blocks, self._blocks = self._blocks, None
        eager, compiled = ([[span.milliseconds() for span in block] for block in blocks[i::2]] for i in (0, 1))
        comparison = compare(eager, compiled)
        if comparison is not None and comparison.outcome == "slower":
            of = [median_ms([ms for block in side for ms in block]) or 0.0 for side in (eager, compiled)]
            text = f"compiled steps were slower in alternating blocks ({of[0]:.2f} → {of[1]:.2f} ms)"
            self._record("sent_back", text)
            self.variant = EAGER_VARIANT
