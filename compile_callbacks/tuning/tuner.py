"""`Tuner`: decides which candidate of a `Tune` runs next, and which candidate wins, for `PhaseTuning`.

Candidates run in interleaved blocks of steps, in alternating order (eager, a, b; b, a, eager). If the machine becomes
slower or faster, this affects all candidates. After each block, the tuner compares the candidates with eager and with
each other. It uses no clock and no random numbers, so all ranks make the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.config.tune import AUTO, LEAST_SAMPLES, Tune
from compile_callbacks.tuning.trial import Block, Trial, compare

_MOST_ROUNDS = 2  # twice the rounds that would suffice if each timed step gave a sample
_CLEAR_SAMPLES = 2 * LEAST_SAMPLES  # two blocks, because the machine may have been busy during one block

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
        self.trials: dict[str, Trial] = {EAGER: Trial(EAGER)}
        self.steps_left = math.inf  # the steps in which a candidate of "auto" must amortize its compile time
        self._tune = tune
        self._device_type = "cpu" if device_type == "cpu" else "cuda"
        self._eager = self.trials[EAGER]
        self._turns = [self._eager]
        self._round = 1
        self._budget_left = math.inf if tune.budget_seconds is None else tune.budget_seconds

    @property
    def started(self) -> bool:
        """Whether the candidates are known."""
        return len(self.trials) > 1

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
            one.verdict in ("failed", "not compared") or (one.verdict == "not faster" and self._is_faster(one))
            for one in self.trials.values()
        )
        return self.winner is not None and self.complete and not (self.winner == EAGER and unknown)

    def start(self, trials: Sequence[Trial]) -> None:
        """Start trying candidates in this order."""
        self.trials |= {one.candidate: one for one in trials}
        self._turns = self._in_play()
        self._next_turn()

    def block_ends(self, block: Block) -> None:
        """End a block of `candidate`."""
        one = self._turns[0]
        one.blocks += 1
        for workload, samples in block.times.items():
            one.times[workload] += samples
        if one is not self._eager:
            one.compile_seconds = block.compile_seconds
        self._budget_left -= block.seconds
        self.steps_left -= block.steps
        if block.problem is not None:
            one.decide(*block.problem)
        compare(list(self.trials.values()))
        if not self.started:
            return
        self._turns.pop(0)
        self._drop_slower_candidates()
        in_play = self._in_play()
        if len(in_play) == 1 and self._is_clear(in_play[0], self._eager, self._tune.min_speedup):
            self._choose(in_play[0])
        elif self._budget_left <= 0:
            self.complete = False
            self._choose_fastest(f"budget_seconds={self._tune.budget_seconds:g} was used up")
        else:
            self._next_turn()

    def adopt(self, name: str, reason: str) -> None:
        """Choose a candidate that won in an earlier run or on another rank."""
        self.complete = True
        for one in self.trials.values():
            if one.candidate == name or one.verdict == "chosen":
                one.decide("undecided")
        self._choose(self.trials[name], reason)

    # ------------------------------------------------------------------------------------------ the next block

    def _in_play(self) -> list[Trial]:
        return [one for one in self.trials.values() if one.verdict == "undecided" and one is not self._eager]

    def _next_turn(self) -> None:
        """Find the next block to run. After the last block, begin another round or choose."""
        while self._turns and not self._is_to_run(self._turns[0]):
            self._turns.pop(0)
        if self._turns:
            return
        in_play = self._in_play()
        lacks_samples = any(one.samples < self._tune.steps for one in (self._eager, *in_play))
        if in_play and lacks_samples and self._round < _MOST_ROUNDS * math.ceil(self._tune.steps / LEAST_SAMPLES):
            self._round += 1
            turns = [self._eager, *in_play]
            self._turns = turns if self._round % 2 else turns[::-1]
        else:
            self._choose_fastest()

    def _is_to_run(self, one: Trial) -> bool:
        new = one.verdict == "undecided" and one is not self._eager and not one.blocks
        if new and (reason := self._why_not_compiled(one)) is not None:
            one.decide("not tried", reason)
            self.complete = False
        return one.verdict == "undecided"

    def _why_not_compiled(self, one: Trial) -> str | None:
        """Return the reason why a candidate is not worth its compile time, or ``None`` if it may be."""
        if self._eager.stats is None:
            return None
        eager_ms = self._eager.median_ms()
        best_ms = min(trial.median_ms() for trial in (self._eager, *self._in_play()) if trial.stats)
        costs = [t.compile_seconds / t.compile_cost for t in self.trials.values() if t.compile_seconds]
        seconds = max(costs, default=_FIRST_COMPILE_SECONDS[self._device_type]) * one.compile_cost
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

    def _drop_slower_candidates(self) -> None:
        """Exclude candidates that are clearly not faster than eager, or clearly slower than another candidate."""
        for one in self._in_play():
            if self._is_clear(self._eager, one, 1 / self._tune.min_speedup):
                one.decide("not faster", self._speedup(one))
            elif any(self._is_clear(other, one) for other in self._in_play()):
                one.decide("beaten")

    def _choose_fastest(self, reason: str | None = None) -> None:
        """Choose the fastest candidate that is faster than eager by more than noise. Otherwise, choose eager."""
        for one in self._in_play():
            if not one.blocks:
                one.decide("not tried", reason)
            elif (samples := min(one.samples, self._eager.samples)) < LEAST_SAMPLES:
                few = f"only {samples} steps can be compared"
                one.decide("not compared", f"{few} ({reason})" if reason else few)
            elif not self._is_clear(one, self._eager, self._tune.min_speedup, LEAST_SAMPLES):
                one.decide("not faster", self._speedup(one))
        self._choose(min(self._in_play(), key=Trial.median_ms, default=self._eager), reason)

    def _choose(self, winner: Trial, reason: str | None = None) -> None:
        self.winner = winner.candidate
        for one in (self._eager, *self._in_play()):
            one.decide(*(("beaten",) if one.blocks else ("not tried", f"{winner.candidate} was chosen before")))
        winner.decide("chosen", reason)

    def _is_clear(self, fast: Trial, slow: Trial, factor: float = 1, samples: int = _CLEAR_SAMPLES) -> bool:
        """Return whether the median of ``fast`` times a factor is below the median of ``slow`` by more than noise."""
        if fast.stats is None or slow.stats is None:
            return False
        enough = min(fast.samples, slow.samples) >= min(samples, self._tune.steps)
        return enough and fast.stats.clearly_below(slow.stats, factor)

    def _is_faster(self, one: Trial) -> bool:
        """Return whether the median is below eager's median by ``min_speedup``. This ignores noise."""
        return one.median_ms() * self._tune.min_speedup < self._eager.median_ms()

    def _speedup(self, one: Trial) -> str:
        speedup = f"{self._eager.median_ms() / one.median_ms():.2f} times as fast as eager"
        return f"{speedup}, which is within noise" if self._is_faster(one) else speedup
