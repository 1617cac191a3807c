"""`Tuner`: decides which candidate of a `Tune` runs next, and which candidate wins, for a `TuningPolicy`.

Eager and each candidate run one block of steps in turn, or more if too few steps of the block can be compared. Then
eager and the fastest candidate run one more block each in the final, or more rounds of such blocks if noise hides which
is faster. The tuner uses no clock and no random numbers.

The first step with new shapes may take several times as long: libraries select their kernels (100 ms for cuDNN's
attention on an H200, against 16 ms for the step), and torch records a CUDA graph. Such steps are not compared, because
the first candidates would have most of them. If shapes rarely repeat, they are the usual case, and are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from compile_callbacks._utils.phases import EAGER
from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare, median_ms
from compile_callbacks.tuning.trial import Block, Trial
from compile_callbacks.tuning.tune import AUTO, Tune

LEVEL = 0.99
"""The confidence level of the comparison with eager. It is stricter than in the report, because a `Tune` compares each
candidate with eager, and one false result of them is enough for a wrong choice."""

MIN_SPEEDUP = 1.01
"""The speedup over eager that a candidate needs."""

CLEAR_SPEEDUP = 1.5
"""The speedup of a candidate without graph breaks over the same candidate with them that noise does not explain."""

MAX_BLOCKS = 4
"""The number of blocks after which a candidate without enough samples is not compared."""

MAX_SETTLED_BLOCKS = 16
"""The same number for eager, and for a candidate that does not compile any more, if more steps give samples: it has
some, or it records a CUDA graph in the second step of each shape. With 40 shapes, that takes about 130 steps."""

MAX_ROUNDS = 10
"""The number of rounds of the final, if no earlier round decides."""

MAX_LOST_ROUNDS = 1
"""The number of rounds that the winner may lose. A candidate that is as fast as eager loses at most one of ten rounds
with a probability of 11 / 2**10, about 1 - `LEVEL`."""

# Rough values, which only prevent a compile that a short run cannot amortize.
_FIRST_COMPILE_SECONDS = {"cuda": 10.0, "cpu": 4.0}  # the compile time of a small network, until one is measured
_AUTOTUNE_COST = 8.0  # the factor by which a compile takes longer if Inductor benchmarks kernels
_PLAUSIBLE_SPEEDUP = {"cuda": 5.0, "cpu": 2.0}  # the highest expected speedup over eager
_FURTHER_SPEEDUP = 1.25  # the highest expected speedup over the best candidate so far
_AUTOTUNED_SPEEDUP = 1.25  # the highest expected speedup over the same candidate without `max_autotune`


class Tuner:
    """Decides which candidate runs in the next block of steps, until a candidate is chosen.

    Eager runs first. Call `start` after the first block, and `block_ends` after each block.
    """

    def __init__(self, tune: Tune, device_type: str = "cpu") -> None:
        self.winner: str | None = None  # the chosen candidate
        self.complete = True  # whether a longer run would choose the same candidate
        self.trials: dict[str, Trial] = {EAGER: Trial(EAGER_VARIANT)}
        self.steps_left = math.inf  # the steps of the phase that remain in the run
        self._tune = tune
        self._device_type = "cpu" if device_type == "cpu" else "cuda"
        self._eager = self.trials[EAGER]
        self._turns = [self._eager]
        self._finalist: Trial | None = None
        self._rounds = 0  # of the final: a block of eager and a block of the finalist
        self._round_steps = 0  # the steps of such a round
        self._shapes_repeat = True
        self._unseen_shapes_ms: list[float] = []  # of eager

    @property
    def needs_candidates(self) -> bool:
        """Whether eager was measured, so that the candidates can `start`."""
        return not self._turns and self.winner is None

    @property
    def candidate(self) -> str:
        """The candidate of the next block."""
        return self.winner or self._turns[0].candidate

    @property
    def best(self) -> Variant:
        """The fastest candidate so far, by its median."""
        measured = [trial for trial in (self._eager, *self._undecided()) if trial.median_ms]
        return min(measured, key=lambda trial: trial.median_ms or math.inf, default=self._eager).variant

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
        self.steps_left -= block.steps
        self._round_steps = 2 * block.steps
        if trial is not self._eager:
            trial.compile_seconds = block.compile_seconds
        trial.blocks.append([*block.milliseconds, *(() if self._shapes_repeat else block.unseen_shapes_ms)])
        self._unseen_shapes_ms += block.unseen_shapes_ms if trial is self._eager else ()
        is_short = len(trial.samples) < MIN_SAMPLES and block.problem is None
        if is_short and len(trial.blocks) < _max_blocks(trial, block):
            return
        if is_short and trial is self._eager:
            self._shapes_repeat = False
            trial.blocks.append(self._unseen_shapes_ms.copy())
        self._turns.pop(0)
        if block.problem is not None:
            trial.decide(*block.problem)  # a break can be the reason for a failure: the recompile limit
        if self._finalist is None:  # in the final, new shapes may compile more graphs
            self._heal(trial, block)
        if len(self.trials) > 1:
            self._next_turn()

    def adopt(self, name: str, reason: str) -> None:
        """Choose a candidate that won in an earlier run or on another rank."""
        self.complete = True
        for trial in self.trials.values():
            if trial.candidate == name or trial.verdict == "chosen":
                trial.decide("undecided")
        self._choose(self.trials[name], reason)

    def _heal(self, trial: Trial, block: Block) -> None:
        """Add a candidate without the graph breaks of a trial, or end the trial of one that has as many."""
        trial.graphs, trial.breaks = block.graphs, block.breaks
        base = trial.unhealed
        # Without graphs of the base, torch skipped the frame with the break.
        if trial.verdict == "undecided" and base is not None and 0 < base.graphs <= trial.graphs:
            trial.decide("not faster", f"{', '.join(trial.healing)} did not reduce the number of graphs")
        elif trial.verdict != "wrong" and block.healing and not any(each.unhealed for each in self.trials.values()):
            healed = trial.healed(block.healing)
            self.trials[healed.candidate] = healed
            self._turns.insert(0, healed)

    # ------------------------------------------------------------------------------------------ the next block

    def _undecided(self) -> list[Trial]:
        return [trial for trial in self.trials.values() if trial.verdict == "undecided" and trial is not self._eager]

    def _next_turn(self) -> None:
        """Find the next block to run. After the last block, begin a round of the final or choose."""
        while self._turns and not self._turns[0].blocks and (why := self._why_not_compiled(self._turns[0])):
            reason, would_be_tried = why
            self._turns.pop(0).decide("not tried", reason)
            self.complete = self.complete and not would_be_tried
        if self._turns:
            return
        if self._finalist is None or self._finalist.verdict != "undecided":  # it failed in the final
            self._finalist, self._rounds = self._fastest(), 0
        if self._finalist is None or not self._needs_round(self._finalist):
            self._choose_if_clear(self._finalist)
        elif self._rounds > 0 and self.steps_left < self._round_steps:
            self.complete = False
            self._choose_if_clear(self._finalist)
        else:
            self._rounds += 1
            # The order alternates, so that a machine that becomes faster or slower favors neither of them.
            self._turns = [self._eager, self._finalist][:: 1 if self._rounds % 2 else -1]

    def _why_not_compiled(self, trial: Trial) -> tuple[str, bool] | None:
        """Return the reason why a candidate is not worth its compile time, or ``None`` if it may be.

        The second value tells whether it would be tried in a longer run.
        """
        eager_ms = self._eager.median_ms
        if eager_ms is None or self._tune.candidates != AUTO:
            return None
        best_ms = min([eager_ms, *(ms for tried in self._undecided() if (ms := tried.median_ms))])
        costs = [tried.compile_seconds / _cost(tried) for tried in self.trials.values() if tried.compile_seconds]
        seconds = max(costs, default=_FIRST_COMPILE_SECONDS[self._device_type]) * _cost(trial)
        steps_left = max(0.0, self.steps_left)
        lowest_ms = self._lowest_plausible_ms(trial, eager_ms, best_ms)
        if lowest_ms >= best_ms:
            best = f"another candidate takes {best_ms:.2f} ms"
            return f"its steps could take {lowest_ms:.2f} ms at best, and {best}", False
        saved_seconds = steps_left * (best_ms - lowest_ms) / 1000
        if saved_seconds >= seconds:
            return None
        saved = f"the {steps_left:.0f} steps that remain could save {saved_seconds:.1f} s at best"
        return f"{saved}, and compiling takes about {seconds:.0f} s", True

    def _lowest_plausible_ms(self, trial: Trial, eager_ms: float, best_ms: float) -> float:
        if not _autotunes(trial):
            return min(eager_ms / _PLAUSIBLE_SPEEDUP[self._device_type], best_ms / _FURTHER_SPEEDUP)
        # Tuning changes kernels. It does not change how they are launched: one by one, or by a CUDA graph.
        alike = [tried for tried in self._undecided() if _uses_cudagraphs(tried) == _uses_cudagraphs(trial)]
        return min((ms for tried in alike if (ms := tried.median_ms)), default=best_ms) / _AUTOTUNED_SPEEDUP

    # ------------------------------------------------------------------------------------------ who wins

    def _fastest(self) -> Trial | None:
        """Return the fastest candidate that is faster than eager. Exclude the candidates that are not faster."""
        for trial in self._undecided():
            if (samples := min(len(trial.samples), len(self._eager.samples))) < MIN_SAMPLES:
                trial.decide("not compared", f"only {samples} steps can be compared")
            elif not self._is_faster(trial):
                trial.decide("not faster", self._speedup(trial))
        measured = [(ms, trial) for trial in self._undecided() if (ms := trial.median_ms)]
        fastest = min(measured, key=lambda pair: pair[0])[1] if measured else None
        if fastest is not None and (base := fastest.unhealed) in self._undecided():
            comparison = compare(base.blocks, fastest.blocks, LEVEL) if base is not None else None
            # One block of each shows no small difference. The final compares with eager.
            if comparison is None or (comparison.low <= MIN_SPEEDUP and comparison.ratio < CLEAR_SPEEDUP):
                fastest.decide("not faster", f"{fastest.effect()}, which is within noise")
                return self._fastest()
        return fastest

    def _needs_round(self, finalist: Trial) -> bool:
        if self._rounds == 0:
            return True
        may_win = finalist.verdict == "undecided" and self._lost_rounds(finalist) <= MAX_LOST_ROUNDS
        return may_win and self._rounds < MAX_ROUNDS and not self._is_clear(finalist)

    def _lost_rounds(self, finalist: Trial) -> int:
        """Return the number of rounds in which the finalist was not faster than eager by `MIN_SPEEDUP`."""
        rounds = zip(self._eager.blocks[-self._rounds :], finalist.blocks[-self._rounds :], strict=True)
        medians = [(median_ms(eager), median_ms(compiled)) for eager, compiled in rounds]
        return sum(not (ours and theirs and ours * MIN_SPEEDUP < theirs) for theirs, ours in medians)

    def _is_clear(self, trial: Trial) -> bool:
        """Return whether a trial is faster than eager by `MIN_SPEEDUP` and by more than noise.

        Each block is a window of `compare`, so a disturbance of one block decides nothing.
        """
        comparison = compare(self._eager.blocks, trial.blocks, LEVEL)
        return comparison is not None and comparison.low > MIN_SPEEDUP

    def _wins_by_rounds(self, trial: Trial) -> bool:
        """Return whether a trial has won the final although disturbances are frequent.

        The blocks of a round ran after each other, so a disturbance that lasts for some rounds changes both.
        """
        ran_all = trial is self._finalist and self._rounds == MAX_ROUNDS and not self._turns
        return ran_all and self._lost_rounds(trial) <= MAX_LOST_ROUNDS

    def _choose_if_clear(self, fastest: Trial | None) -> None:
        """Choose a candidate if it is faster than eager by more than noise. Else, choose eager."""
        if fastest is not None and fastest.verdict != "undecided":
            fastest = None
        is_clear, reason = fastest is not None and self._is_clear(fastest), None
        if fastest is not None and not is_clear and self._wins_by_rounds(fastest):
            won = MAX_ROUNDS - self._lost_rounds(fastest)
            is_clear, reason = True, fastest.effect() or f"it was faster than eager in {won} of {MAX_ROUNDS} rounds"
        for trial in () if is_clear else self._undecided():
            trial.decide("not faster", f"{self._speedup(trial)}, which is within noise")
        self._choose(fastest if fastest is not None and is_clear else self._eager, reason)

    def _choose(self, winner: Trial, reason: str | None = None) -> None:
        self.winner = winner.candidate
        for trial in (self._eager, *self._undecided()):
            trial.decide(*(("beaten",) if trial.blocks else ("not tried", f"{winner.candidate} was chosen before")))
        winner.decide("chosen", reason or winner.effect())

    def _is_faster(self, trial: Trial) -> bool:
        """Return whether the median is below eager's median by `MIN_SPEEDUP`. This ignores noise."""
        ms, eager_ms = trial.median_ms, self._eager.median_ms
        return ms is not None and eager_ms is not None and ms * MIN_SPEEDUP < eager_ms

    def _speedup(self, trial: Trial) -> str:
        return f"{(self._eager.median_ms or 0.0) / (trial.median_ms or math.inf):.2f} times as fast as eager"


def _max_blocks(trial: Trial, last: Block) -> int:
    """Return the number of blocks in which a trial may collect samples."""
    more_help = trial.samples or _uses_cudagraphs(trial)
    return MAX_SETTLED_BLOCKS if last.settled and more_help else MAX_BLOCKS


def _cost(trial: Trial) -> float:
    """Return the expected compile time, divided by the compile time of the default mode."""
    return _AUTOTUNE_COST if _autotunes(trial) else 1.0


def _autotunes(trial: Trial) -> bool:
    config = trial.variant.config
    return config is not None and bool(config.resolved_options().get("max_autotune"))


def _uses_cudagraphs(trial: Trial) -> bool:
    config = trial.variant.config
    return config is not None and config.uses_cudagraphs
