"""`Tuner`: which candidate runs next, and which one wins. It uses no torch and no clock, so all ranks decide alike.

Candidates run in blocks of steps, forth and back (eager, a, b; b, a, eager), so that a machine that becomes slower or
faster does so for all of them. After each block, the candidates are compared with eager and with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from compile_callbacks.config.mode import EAGER
from compile_callbacks.config.tune import LEAST_SAMPLES, Tune
from compile_callbacks.tuning.trial import Block, Trial, compare

_MOST_ROUNDS = 2  # times those that the samples need: a block may give few of them
_CLEAR_SAMPLES = 2 * LEAST_SAMPLES  # of two blocks, because one of them may have run while the machine was busy


class Tuner:
    """Decides which candidate the next block of steps runs with, until one is chosen.

    Eager runs first. Call `block_ends` after each block, and `start` after the first one. All decisions follow from
    these calls alone.

    Args:
        tune: The limits.
        why_not: Returns why a candidate is not worth compiling, or ``None``, given its name, the median of an eager
            step, the lowest median so far (milliseconds), and the rest of the budget (seconds).
    """

    def __init__(
        self, tune: Tune, why_not: Callable[[str, float, float, float], str | None] = lambda *known: None
    ) -> None:
        self.winner: str | None = None
        """The chosen candidate; ``None`` before the choice."""
        self.complete = True
        """Whether all candidates had their chance, so that a longer run would choose the same."""
        self.trials: dict[str, Trial] = {EAGER: Trial(EAGER)}
        """The result of each candidate so far, eager first."""
        self._tune = tune
        self._why_not = why_not
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
    def worth_keeping(self) -> bool:
        """Whether later runs may rely on the winner.

        They may not if the comparison was cut short, or if eager won because a candidate failed (a missing compiler,
        for example), could not be compared, or was faster only within noise (a busy machine).
        """
        unknown = any(
            one.verdict in ("failed", "not compared") or (one.verdict == "not faster" and self._is_faster(one))
            for one in self.trials.values()
        )
        return self.winner is not None and self.complete and not (self.winner == EAGER and unknown)

    def start(self, candidates: Mapping[str, str | None]) -> None:
        """Name the candidates in order, each with the reason why it is not tried, or ``None``."""
        for name, reason in candidates.items():
            self.trials[name] = Trial(name, "not tried" if reason else "undecided", reason)
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
            self.conclude(f"budget_seconds={self._tune.budget_seconds:g} was used up")
        else:
            self._next_turn()

    def conclude(self, reason: str) -> None:
        """Choose now, before the candidates have all their samples. If not even eager has any, nothing is chosen."""
        if self.winner is None and self._eager.blocks:
            self.complete = False
            self._choose_fastest(reason)

    def adopt(self, name: str, reason: str) -> None:
        """Choose a candidate that was measured elsewhere: in an earlier run, or by another rank."""
        self.complete = True
        for one in self.trials.values():
            if one.candidate == name or one.verdict == "chosen":
                one.decide("undecided")
        self._choose(self.trials[name], reason)

    # ------------------------------------------------------------------------------------------ the next block

    def _next_turn(self) -> None:
        """Find the next block that is worth running; after the last one, begin another round, or choose."""
        while self.winner is None:
            while self._turns and not self._is_worth_it(self._turns[0]):
                self._turns.pop(0)
            if self._turns:
                return
            in_play = self._in_play()
            wanting = any(one.samples < self._tune.steps for one in (self._eager, *in_play))
            if in_play and wanting and self._round < _MOST_ROUNDS * math.ceil(self._tune.steps / LEAST_SAMPLES):
                self._round += 1
                turns = [self._eager, *in_play]
                self._turns = turns if self._round % 2 else turns[::-1]
            else:
                self._choose_fastest()

    def _is_worth_it(self, one: Trial) -> bool:
        """Whether to run a block of a candidate. Before it is compiled for the first time, ``why_not`` is asked."""
        if one is self._eager or one.blocks or self._eager.stats is None or one.verdict != "undecided":
            return one.verdict == "undecided"
        medians = [other.stats.median_ms for other in (self._eager, *self._in_play()) if other.stats is not None]
        reason = self._why_not(one.candidate, self._eager.stats.median_ms, min(medians), self._budget_left)
        if reason is not None:
            one.decide("not tried", reason)
            self.complete = False
        return reason is None

    # ------------------------------------------------------------------------------------------ who wins

    def _in_play(self) -> list[Trial]:
        return [one for one in self.trials.values() if one.verdict == "undecided" and one is not self._eager]

    def _drop_slower_candidates(self) -> None:
        """Rule out candidates that are clearly not faster than eager, or clearly slower than another one."""
        for one in self._in_play():
            if self._is_clear(self._eager, one, 1 / self._tune.min_speedup):
                one.decide("not faster", self._speedup(one))
            elif any(self._is_clear(other, one) for other in self._in_play()):
                one.decide("beaten")

    def _choose_fastest(self, reason: str | None = None) -> None:
        """Choose the candidate with the lowest median among those that are faster than eager beyond noise, or eager."""
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
        """Whether the median of one, times a factor, is below that of the other, beyond noise."""
        if fast.stats is None or slow.stats is None:
            return False
        enough = min(fast.samples, slow.samples) >= min(samples, self._tune.steps)
        return enough and fast.stats.clearly_below(slow.stats, factor)

    def _is_faster(self, one: Trial) -> bool:
        """Whether the median is below that of eager by ``min_speedup``, noise or not."""
        return one.median_ms() * self._tune.min_speedup < self._eager.median_ms()

    def _speedup(self, one: Trial) -> str:
        speedup = f"{self._eager.median_ms() / one.median_ms():.2f} times as fast as eager"
        return f"{speedup}, which is within noise" if self._is_faster(one) else speedup
