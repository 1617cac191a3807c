"""Which candidate runs next, and which is chosen: the decisions of a `Tune`, without torch and without clocks.

Candidates run in blocks of steps, in turn and back again (eager, a, b; b, a, eager), so that a machine that slows down
or speeds up does so for all of them. After each block they are compared with eager and with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from compile_callbacks.measuring.work import Work
from compile_callbacks.settings.mode import EAGER
from compile_callbacks.settings.tune import Rule
from compile_callbacks.tuning.trial import BLOCK_SAMPLES, Candidate, Known, Scores, Trial, Verdict

_STEPS_A_BLOCK = 3  # times the steps that its samples need: where few steps are samples, a block ends all the same
_STEPS_A_CANDIDATE = 4  # times the samples that it gets
_EARLIER = "chosen in an earlier run"


class Tuner:
    """Decides which candidate a step runs with, until one is chosen.

    It is asked for `candidate` before each step and told of the step afterwards: `step_ends`, then `measured` with
    the candidate's samples and `block_ends` where that says so, or `rule_out`. What it decides depends on what it is
    told alone.

    Args:
        names: The candidates in order, without eager.
        rule: As `Tune` takes it.
        steps: As `Tune` takes it.
        budget_seconds: As `Tune` takes it.
        min_speedup: As `Tune` takes it.
        latency_budget_ms: As `Tune` takes it.
        least_steps: Steps of the phase; in a run that has fewer nothing is tried.
        skip: Candidates that are not to be tried at all, and why.
        compile_seconds: What compiling candidates took before, by name.
        compiled: A candidate that is compiled already, and so always worth trying.
        why_not: Tells, given a name and what is known, why that candidate is not worth compiling, or ``None``.
    """

    def __init__(
        self,
        names: Iterable[str],
        *,
        rule: Rule = "throughput",
        steps: int = 20,
        budget_seconds: float | None = None,
        min_speedup: float = 1.01,
        latency_budget_ms: float | None = None,
        least_steps: int = 0,
        skip: Mapping[str, str] | None = None,
        compile_seconds: Mapping[str, float] | None = None,
        compiled: str | None = None,
        why_not: Callable[[str, Known], str | None] = lambda name, known: None,
    ) -> None:
        self.winner: str | None = None
        """What is chosen; ``None`` while nothing is."""
        self._eager = Candidate(EAGER)
        self._others = {name: Candidate(name) for name in names}
        for name, reason in (skip or {}).items():
            self._others[name].rule_out("not tried", reason)
        self._scores = Scores(rule, steps, min_speedup, latency_budget_ms, {EAGER: self._eager, **self._others})
        self.holds_for_steps = 0.0
        """The longest run, in steps of the phase, that would choose the same; 0 where the choice was cut short."""
        self.believed = False
        """Whether the choice is an earlier run's, and not all candidates were tried in this one."""
        self._rule = rule
        self._steps = steps
        self._budget_seconds = budget_seconds
        self._least_steps = least_steps
        self._why_not = why_not
        self._compile_seconds = dict(compile_seconds or {})
        self._compiled = compiled
        self.steps_left = math.inf
        """Steps of the phase that remain of the run; infinite where that is not known."""
        self._run_seconds = self._seconds_to_end = math.inf  # by the clock: of the run, and what is left of it
        self._spent_seconds = 0.0
        self._not_worth: list[Candidate] = []
        self._cut_off: list[Candidate] = []
        self._run_steps = self._looked_at_steps = 0.0  # of the run, and of the longest that found them not worth it
        self._remembered: Candidate | None = None
        self._remembered_for_steps = 0.0
        self._eager_is_old = False
        self._eager_samples: dict[Work, int] = {}  # how many were measured, what was left behind among them
        self._samples_before: dict[Work, int] = {}  # the same, when the run began
        self._left_behind: set[Work] = set()
        self._rounds = 0
        self._turns: list[Candidate] = []
        self._steps_of_block = self._samples_of_block = 0
        self._next_turn()

    # ------------------------------------------------------------------------------------------ what it is told

    def run_begins(self) -> None:
        """Another trainer run, maybe with other batches: what goes on is compared with eager steps of this run too."""
        self._eager_is_old = bool(self._eager.steps)
        self._samples_before = dict(self._eager_samples)
        if self.winner is None and self._eager_is_old:
            self._turns = [self._eager, *(one for one in self._turns if one is not self._eager)]
            self._steps_of_block = self._samples_of_block = 0

    def plan(self, steps_left: float, seconds_left: float = math.inf) -> None:
        """A run begins: what `settle` cut off goes on.

        What was not worth its compile in an earlier run is looked at again if this one is longer.

        Args:
            steps_left: Steps of the phase to come, ``math.inf`` where that is not known; 0 where the run has none.
            seconds_left: When the run ends at the latest; ``math.inf`` where it does not go by the clock.
        """
        self.steps_left = self._run_steps = steps_left
        self._run_seconds = self._seconds_to_end = seconds_left
        again: list[Candidate] = []
        if steps_left > 0:
            again += self._cut_off
            self._cut_off.clear()
        if self._is_longer_than(self._looked_at_steps):
            again += self._not_worth
            self._not_worth.clear()
        if again:
            self._reopen(again)
        if self.winner is None and 0 < steps_left < self._least_steps and not self._eager.steps:
            few = f"the run has {steps_left:.0f} steps of the phase, and comparing takes {self._least_steps} at least"
            for one in self._in_play():
                self._leave_for_now(one, few, steps_left)
            self._settle(None)

    def remember(self, name: str, held_for_steps: float = math.inf, *, how_to_forget: str | None = None) -> None:
        """An earlier run chose this candidate: it is compared with eager alone, before any other is tried.

        Args:
            name: The candidate.
            held_for_steps: The longest run, in steps of the phase, that the choice holds for: a longer one forgets it.
            how_to_forget: What to do for all candidates to be tried again, where eager is not to stay.
        """
        if self.winner is not None or not held_for_steps or self._is_longer_than(held_for_steps):
            return
        if name == EAGER:
            reason = _EARLIER if how_to_forget is None else f"{_EARLIER}; {how_to_forget}"
            self._choose(self._eager, reason, when=_EARLIER, holds_for_steps=held_for_steps)
        elif name in self._others and not self._others[name].out:
            self._remembered, self._remembered_for_steps = self._others[name], held_for_steps
            self._turns = [self._turns[0], self._remembered]

    @property
    def candidate(self) -> str:
        """What the next step is to run with."""
        return self.winner if self.winner is not None else self._turns[0].name

    def step_ends(self, *, sample: bool, seconds: float, compile_seconds: float = 0) -> bool:
        """A step with `candidate` is done.

        Args:
            sample: Whether its time is a sample.
            seconds: How long it took, compiling included.
            compile_seconds: How much of that went into compiling.

        Returns:
            Whether the block is over: `block_ends` is to follow.
        """
        now = self._turns[0]
        now.steps += 1
        now.compile_seconds += compile_seconds
        self.steps_left -= 1
        self._seconds_to_end -= seconds
        self._spent_seconds += seconds
        self._steps_of_block += 1
        self._samples_of_block += sample
        wanted = min(BLOCK_SAMPLES, self._steps)
        most = _STEPS_A_BLOCK * (wanted + 2)
        return self._samples_of_block >= wanted or self._steps_of_block >= most or self._seconds_left <= 0

    def measured(self, times: Mapping[Work, Sequence[float]]) -> None:
        """A block of `candidate` is done: `block_ends` is to follow.

        Args:
            times: All of the candidate's samples so far, in milliseconds, by their work.
        """
        if self._turns[0] is self._eager:
            if self._eager_is_old:
                self._leave_behind(times)
            self._eager_is_old = False
        if self._turns[0] is self._eager:
            self._eager_samples = {work: len(samples) for work, samples in times.items()}
        self._turns[0].times = {
            work: tuple(samples) for work, samples in times.items() if samples and work not in self._left_behind
        }

    def _leave_behind(self, times: Mapping[Work, Sequence[float]]) -> None:
        """Forget the samples of earlier runs where the first eager steps of this one had other work to do."""
        before = self._eager.times
        new = {work for work, samples in times.items() if len(samples) > self._samples_before.get(work, 0)}
        if not new or not before or max(before, key=lambda work: len(before[work])) in new:
            return
        self._left_behind = (self._left_behind | before.keys()) - new
        for one in (self._eager, *self._in_play()):
            one.times = {work: samples for work, samples in one.times.items() if work not in self._left_behind}
            one.steps = min(one.steps, 1)  # it was compiled

    def block_ends(self) -> None:
        """Judge what was measured, and go on to the next block."""
        self._rule_out_losers()
        if self._remembered is not None:
            self._judge_remembered(self._remembered)
        else:
            self._choose_if_clear()
        self._block_is_over()

    def rule_out(self, verdict: Verdict, reason: str) -> None:
        """`candidate` failed, or computes something else: it does not run again."""
        now = self._turns[0]
        now.rule_out(verdict, reason)
        if now is self._remembered:
            self._remembered = None
        self._block_is_over()

    def settle(self, reason: str) -> None:
        """Choose among what is proven so far, and eager, until the next run; nothing where the phase did not run.

        Args:
            reason: Why now.
        """
        compiled = self._others.get(str(self._compiled))
        if self.winner is None and compiled is not None and not (compiled.out or self._scores.proven(compiled.name)):
            self._cut_off = self._in_play()
            self._choose(compiled, f"chosen before, and {reason}", holds_for_steps=0.0)
        elif self.winner is None and self._eager.steps:
            self._cut_off = self._in_play()
            self._settle(reason)

    # ------------------------------------------------------------------------------------------ what it tells

    def is_out(self, name: str) -> bool:
        """Whether a candidate is not to run again."""
        return name != EAGER and self._others[name].out

    @property
    def worth_keeping(self) -> bool:
        """Whether later runs may go by the choice.

        Not where it was cut short, nor where eager was chosen though a candidate failed, as without a C++ compiler, or
        could not be judged.
        """
        unknown = any(one.verdict in ("failed", "not judged") for one in self._others.values())
        return self.winner is not None and self.holds_for_steps > 0 and not (self.winner == EAGER and unknown)

    @property
    def by_size(self) -> bool:
        """Whether shapes vary, so that steps are compared by the size of their batches."""
        return self._scores.by_size

    @property
    def eager_ms(self) -> float | None:
        """Median of the eager steps that are compared, in milliseconds; ``None`` where there is none."""
        stats = self._scores.stats(EAGER)
        return None if stats is None else stats.median_ms

    @property
    def compile_seconds(self) -> dict[str, float]:
        """What compiling candidates took, by name, here and before."""
        tried = {name: one.compile_seconds for name, one in self._others.items() if one.compile_seconds}
        return {**self._compile_seconds, **tried}

    @property
    def remembers(self) -> bool:
        """Whether an earlier run's choice is being checked."""
        return self._remembered is not None

    def trials(self) -> list[Trial]:
        """What came of each candidate so far, eager first."""
        trials = []
        for one in (self._eager, *self._others.values()):
            stats = self._scores.stats(one.name)
            trials.append(
                Trial(
                    candidate=one.name,
                    verdict=one.verdict,
                    median_ms=stats.median_ms if stats else None,
                    high_ms=stats.high_ms if stats else None,
                    samples=stats.samples if stats else 0,
                    compile_seconds=one.compile_seconds if one.steps and one is not self._eager else None,
                    reason=one.reason,
                )
            )
        return trials

    # ------------------------------------------------------------------------------------------ whose turn it is

    def _block_is_over(self) -> None:
        if self.winner is None and self._seconds_left <= 0:
            self.settle(f"budget_seconds={self._budget_seconds:g} was used up")
            self._cut_off.clear()  # no later run has more of it
        if self.winner is None:
            self._turns.pop(0)
            self._next_turn()

    def _next_turn(self) -> None:
        """Go on to the next turn that is worth it; after the last of a round, to another round or to the choice."""
        self._steps_of_block = self._samples_of_block = 0
        while self.winner is None:
            while self._turns and (self._turns[0].out or not self._is_worth_it(self._turns[0])):
                self._turns.pop(0)
            if self._turns:
                return
            self._turns = self._next_round()
            if not self._turns:
                self._settle(None)

    def _next_round(self) -> list[Candidate]:
        """Who runs in the next round: eager and all others, or under rules that go by order, one other at a time."""
        if self._remembered is not None and self._is_done(self._remembered) and self._is_done(self._eager):
            self._remembered = None  # its steps are not comparable with eager's
        eager = [] if self._is_done(self._eager) else [self._eager]
        in_play = self._in_play()[:1] if self._rule == "first" else self._in_play()
        others = [one for one in in_play if not self._is_done(one)]
        if self._remembered is not None:
            others = [self._remembered]
        elif self._rule == "latency_budget":
            others = [] if eager else others[:1]
        if not in_play:
            return []
        self._rounds += 1
        turns = eager + others
        # What a candidate is worth is weighed against eager steps of this run.
        eager_first = self._rounds % 2 or self._eager_is_old or self._scores.stats(EAGER) is None
        return turns if eager_first else turns[::-1]

    def _is_done(self, one: Candidate) -> bool:
        """Whether a candidate has all the samples that it gets."""
        if one is self._eager and self._eager_is_old:
            return False
        most = _STEPS_A_CANDIDATE * (self._steps + BLOCK_SAMPLES)
        return self._scores.samples(one.name) >= self._steps or one.steps >= most

    def _is_worth_it(self, one: Candidate) -> bool:
        """Whether a candidate that was never compiled is worth that; says why where it is not."""
        eager = self._scores.stats(EAGER)
        if one is self._eager or one is self._remembered or one.steps or eager is None or one.name == self._compiled:
            return True
        measured = [stats for other in self._in_play() if (stats := self._scores.stats(other.name))]
        known = Known(
            steps_left=min(self.steps_left, max(0.0, self._seconds_to_end) * 1000 / eager.median_ms),
            eager_ms=eager.median_ms,
            best_ms=min(stats.median_ms for stats in (eager, *measured)),
            seconds_left=self._seconds_left,
            compile_seconds=self.compile_seconds,
        )
        if (reason := self._why_not(one.name, known)) is None:
            return True
        self._leave_for_now(one, reason, self._steps_of_run())
        return False

    def _steps_of_run(self) -> float:
        """How many steps the run has, by its epochs, and by its clock once eager was measured."""
        eager = self._scores.stats(EAGER)
        return self._run_steps if eager is None else min(self._run_steps, self._run_seconds * 1000 / eager.median_ms)

    def _is_longer_than(self, steps: float) -> bool:
        """Whether the run has more steps; by the clock it is never exactly as long as another."""
        tolerance = 1.25 if self._steps_of_run() < self._run_steps else 1
        return self._steps_of_run() > steps * tolerance

    def _leave_for_now(self, one: Candidate, reason: str, run_steps: float) -> None:
        one.rule_out("not tried", reason)
        self._not_worth.append(one)
        self._looked_at_steps = max(self._looked_at_steps, run_steps)

    @property
    def _seconds_left(self) -> float:
        return math.inf if self._budget_seconds is None else self._budget_seconds - self._spent_seconds

    # ------------------------------------------------------------------------------------------ who is out, who wins

    def _in_play(self) -> list[Candidate]:
        return [one for one in self._others.values() if not one.out]

    def _rule_out_losers(self) -> None:
        in_play = self._in_play()
        for one in in_play:
            if self._scores.clearly_fails(one.name):
                one.rule_out("not faster", self._scores.speedup_in_words(one.name))
            elif self._rule in ("throughput", "latency") and any(
                self._scores.clearly_beats(other.name, one.name) for other in in_play if not other.out
            ):
                one.rule_out("beaten")

    def _choose_if_clear(self) -> None:
        now, in_play = self._turns[0], self._in_play()
        alone = self._rule == "first" or (self._rule == "throughput" and len(in_play) == 1)
        if alone and in_play and self._scores.clearly_passes(in_play[0].name):
            self._choose(in_play[0])
        elif self._rule == "first" and in_play and self._is_done(in_play[0]) and self._is_done(self._eager):
            self._conclude(in_play[0])
        elif self._rule == "latency_budget" and self._is_done(now) and not now.out:
            passes = now is self._eager or self._scores.passes(now.name)
            if passes and self._scores.within_latency_budget(now.name):
                self._choose(now)

    def _judge_remembered(self, one: Candidate) -> None:
        """Believe an earlier run's choice where it is faster than eager in this run too; else try all of them."""
        if one.out:
            self._remembered = None
        elif self._scores.proven(one.name):
            self._remembered = None
            if self._scores.passes(one.name):
                reason = f"{_EARLIER}, and faster than eager in this one"
                self._choose(one, reason, when=_EARLIER, holds_for_steps=self._remembered_for_steps)

    def _conclude(self, one: Candidate) -> None:
        """A candidate has its samples: it is chosen, or out."""
        if self._scores.proven(one.name) and self._scores.passes(one.name):
            self._choose(one)
        else:
            self._rule_out_unproven(one, None)

    def _rule_out_unproven(self, one: Candidate, reason: str | None) -> None:
        """Rule out a candidate unless it has the samples and is faster than eager."""
        if not one.steps:
            one.rule_out("not tried", reason)
        elif not self._scores.proven(one.name):
            comparable = f"{self._scores.samples(one.name)} steps comparable with eager's, of {one.steps}"
            few = f"{comparable}, are too few to judge by"
            one.rule_out("not judged", few + (f" ({reason})" if reason else ""))
        elif not self._scores.passes(one.name):
            one.rule_out("not faster", self._scores.speedup_in_words(one.name))

    def _settle(self, reason: str | None) -> None:
        for one in self._in_play():
            self._rule_out_unproven(one, reason)
        left = self._in_play()
        if self._rule == "first":
            left = left[:1]
        if self._rule == "latency_budget":
            left = [one for one in left if self._scores.within_latency_budget(one.name)][:1] or left
        best = min(left, key=lambda one: self._scores.measure_ms(one.name), default=self._eager)
        self._choose(best, reason, holds_for_steps=None if reason is None else 0.0)

    def _choose(
        self,
        winner: Candidate,
        reason: str | None = None,
        *,
        when: str = "chosen before its turn",
        holds_for_steps: float | None = None,
    ) -> None:
        self.winner, self.believed = winner.name, when == _EARLIER
        if holds_for_steps is None:
            holds_for_steps = self._looked_at_steps if self._not_worth else math.inf
        self.holds_for_steps = holds_for_steps
        self._eager.rule_out("beaten")
        for one in self._in_play():
            if one.steps:
                one.rule_out("beaten")
            else:
                one.rule_out("not tried", f"{winner.name} was {when}")
                if when == _EARLIER:
                    self._not_worth.append(one)
        if when == _EARLIER:
            self._looked_at_steps = max(self._looked_at_steps, holds_for_steps)
        winner.verdict, winner.reason = "chosen", reason

    def _reopen(self, again: Sequence[Candidate]) -> None:
        """There is more to try: what was chosen goes on with the samples that it has, and so does the check of it."""
        for one in (self._eager, *again):
            one.rule_out("undecided")
        if self.winner not in (None, EAGER):
            self._others[str(self.winner)].rule_out("undecided")
        self.winner, self._turns = None, []
        self._next_turn()
