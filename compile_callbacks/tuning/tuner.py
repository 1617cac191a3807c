"""`Tuner`: decides which candidate of a `Tune` runs next, and which candidate wins, for a `TuningPolicy`.

Eager and each candidate run one block of steps in turn. Then eager and the fastest candidate run one more block each,
and only these two blocks decide. The tuner uses no clock and no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.config.tune import AUTO, LEAST_SAMPLES, Tune
from compile_callbacks.config.variant import EAGER_VARIANT
from compile_callbacks.profiling.step_stats import StepStats
from compile_callbacks.tuning.trial import Block, Trial

# Rough values, which only prevent a compile that a short run cannot amortize.
_FIRST_COMPILE_SECONDS = {"cuda": 10.0, "cpu": 4.0}  # the compile time of a small network, until one is measured
_PLAUSIBLE_SPEEDUP = {"cuda": 5.0, "cpu": 2.0}  # the highest expected speedup over eager
_FURTHER_SPEEDUP = 1.25  # the highest expected speedup over the best candidate so far


class Tuner:
    """Decides which candidate runs in the next block of steps, until a candidate is chosen.

    Eager runs first. Call `start` after the first block, and `block_ends` after each block.
    """

    def __init__(self, tune: Tune, device_type: str = "cpu") -> None:
        self.winner: str | None = None  # the chosen candidate
        self.complete = True  # whether a longer run would choose the same candidate
        self.trials: dict[str, Trial] = {EAGER: Trial(EAGER_VARIANT)}
        self.steps_left = math.inf  # the steps in which a candidate of "auto" must amortize its compile time
        self._tune = tune
        self._device_type = "cpu" if device_type == "cpu" else "cuda"
        self._eager = self.trials[EAGER]
        self._turns = [self._eager]
        self._finalist: Trial | None = None
        self._short_block: Sequence[float] | None = None  # a block with too few samples, which runs once more
        self._budget_left = math.inf if tune.budget_seconds is None else tune.budget_seconds

    @property
    def started(self) -> bool:
        """Whether the candidates are known."""
        return len(self.trials) > 1

    @property
    def first_block_is_over(self) -> bool:
        """Whether eager was measured, so that the candidates can start."""
        return not self._turns

    @property
    def candidate(self) -> str:
        """The candidate of the next block."""
        return self.winner or self._turns[0].candidate

    @property
    def lasts(self) -> bool:
        """Whether the next run of this process may use the winner. ``False`` if this run was too short to compare."""
        return self.winner is not None and (self.complete or self.winner != EAGER)

    @property
    def worth_keeping(self) -> bool:
        """Whether later processes may use the winner.

        This is ``False`` if the comparison ended early. It is also ``False`` if eager won because a candidate failed
        (for example without a compiler), could not be compared, or was faster only within noise (on a busy machine).
        """
        unknown = any(
            trial.verdict in ("failed", "not compared") or (trial.verdict == "not faster" and self._is_faster(trial))
            for trial in self.trials.values()
        )
        return self.winner is not None and self.complete and not (self.winner == EAGER and unknown)

    def start(self, trials: Sequence[Trial]) -> None:
        """Start trying candidates in this order."""
        self.trials |= {trial.candidate: trial for trial in trials}
        self._turns = self._undecided()
        self._next_turn()

    def block_ends(self, block: Block) -> None:
        """End a block of `candidate`."""
        trial = self._turns[0]
        self._budget_left -= block.seconds
        self.steps_left -= block.steps
        if trial is not self._eager:
            trial.compile_seconds = block.compile_seconds
        milliseconds = [*(self._short_block or ()), *block.milliseconds]
        is_short = len(milliseconds) < LEAST_SAMPLES and block.problem is None and self._budget_left > 0
        if is_short and self._short_block is None:
            self._short_block = milliseconds
            return
        self._short_block = None
        trial.blocks.append(milliseconds)
        self._turns.pop(0)
        if block.problem is not None:
            trial.decide(*block.problem)
        if not self.started:
            return
        if self._budget_left > 0:
            self._next_turn()
        else:
            self.complete = False
            self._choose_fastest(f"budget_seconds={self._tune.budget_seconds:g} was used up")

    def adopt(self, name: str, reason: str) -> None:
        """Choose a candidate that won in an earlier run or on another rank."""
        self.complete = True
        for trial in self.trials.values():
            if trial.candidate == name or trial.verdict == "chosen":
                trial.decide("undecided")
        self._choose(self.trials[name], reason)

    # ------------------------------------------------------------------------------------------ the next block

    def _undecided(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.verdict == "undecided" and trial is not self._eager]

    def _next_turn(self) -> None:
        """Find the next block to run. After the last block, begin the confirmation or choose."""
        while self._turns and not self._turns[0].blocks and (reason := self._why_not_compiled(self._turns[0])):
            self._turns.pop(0).decide("not tried", reason)
            self.complete = False
        if self._turns:
            return
        if self._finalist is not None:
            self._confirm(self._finalist)
        elif (finalist := self._fastest()) is not None:
            self._finalist, self._turns = finalist, [self._eager, finalist]
        else:
            self._choose(self._eager)

    def _why_not_compiled(self, trial: Trial) -> str | None:
        """Return the reason why a candidate is not worth its compile time, or ``None`` if it may be."""
        if self._eager.stats is None:
            return None
        eager_ms = self._eager.stats.median_ms
        best_ms = min(stats.median_ms for other in (self._eager, *self._undecided()) if (stats := other.stats))
        costs = [t.compile_seconds / t.compile_cost for t in self.trials.values() if t.compile_seconds]
        seconds = max(costs, default=_FIRST_COMPILE_SECONDS[self._device_type]) * trial.compile_cost
        if costs and seconds > self._budget_left:
            left = f"{self._budget_left:.1f} s of budget_seconds are left"
            return f"compiling takes about {seconds:.0f} s, and {left}"
        if self._tune.candidates != AUTO:
            return None
        steps_left = max(0.0, self.steps_left)
        fastest_ms = min(eager_ms / _PLAUSIBLE_SPEEDUP[self._device_type], best_ms / _FURTHER_SPEEDUP)
        saved_seconds = steps_left * (best_ms - fastest_ms) / 1000
        if saved_seconds >= seconds:
            return None
        saved = f"the {steps_left:.0f} steps that remain could save {saved_seconds:.1f} s at best"
        return f"{saved}, and compiling takes about {seconds:.0f} s"

    # ------------------------------------------------------------------------------------------ who wins

    def _fastest(self) -> Trial | None:
        """Return the fastest candidate that is faster than eager. Exclude the candidates that are not faster."""
        for trial in self._undecided():
            if not trial.blocks:
                continue
            if (samples := min(trial.samples, self._eager.samples)) < LEAST_SAMPLES:
                trial.decide("not compared", f"only {samples} steps can be compared")
            elif not self._is_faster(trial):
                trial.decide("not faster", self._speedup(trial))
        measured = [(stats.median_ms, trial) for trial in self._undecided() if (stats := trial.stats)]
        return min(measured, key=lambda pair: pair[0])[1] if measured else None

    def _confirm(self, finalist: Trial) -> None:
        """Choose the finalist if it is faster than eager by more than noise in the last blocks. Else, choose eager."""
        if finalist.verdict == "undecided" and self._is_clear(finalist.last_stats, self._eager.last_stats):
            self._choose(finalist)
            return
        for trial in self._undecided():
            trial.decide("not faster", f"{self._speedup(trial)}, which is within noise")
        self._choose(self._eager)

    def _choose_fastest(self, reason: str) -> None:
        """Choose the fastest candidate so far, or eager."""
        fastest = self._fastest()
        is_clear = fastest is not None and self._is_clear(fastest.stats, self._eager.stats)
        for trial in self._undecided():
            if not trial.blocks:
                trial.decide("not tried", reason)
            elif not is_clear:
                trial.decide("not faster", f"{self._speedup(trial)}, which is within noise")
        fastest = fastest if is_clear else None
        self._choose(fastest or self._eager, reason)

    def _choose(self, winner: Trial, reason: str | None = None) -> None:
        self.winner = winner.candidate
        for trial in (self._eager, *self._undecided()):
            trial.decide(*(("beaten",) if trial.blocks else ("not tried", f"{winner.candidate} was chosen before")))
        winner.decide("chosen", reason)

    def _is_clear(self, fast: StepStats | None, slow: StepStats | None) -> bool:
        """Return whether one median is below another one by ``min_speedup`` and by more than noise."""
        return fast is not None and slow is not None and fast.clearly_below(slow, self._tune.min_speedup)

    def _is_faster(self, trial: Trial) -> bool:
        """Return whether the median is below eager's median by ``min_speedup``. This ignores noise."""
        stats, eager = trial.stats, self._eager.stats
        return stats is not None and eager is not None and stats.median_ms * self._tune.min_speedup < eager.median_ms

    def _speedup(self, trial: Trial) -> str:
        stats, eager = trial.stats, self._eager.stats
        assert stats is not None
        assert eager is not None
        return f"{eager.median_ms / stats.median_ms:.2f} times as fast as eager"
