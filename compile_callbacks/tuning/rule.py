"""The rule of a `Tuning`: which candidate is worth its compile time, which is in the final, and which wins."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compile_callbacks._utils.phases import EAGER
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare, median_ms
from compile_callbacks.tuning.candidates import Trial

LEVEL = 0.99
"""The confidence level of the comparison with eager. It is stricter than in the report, because a `Tune` compares each
candidate with eager, and one false result of them is enough for a wrong choice."""

MIN_SPEEDUP = 1.01
"""The speedup over eager that a candidate needs."""

MAX_ROUNDS = 10
"""The number of rounds of the final, if no earlier round decides."""

MAX_LOST_ROUNDS = 1
"""The number of rounds that the winner may lose. A candidate that is as fast as eager loses at most one of ten rounds
with a probability of 11 / 2**10, about 1 - `LEVEL`."""

# Rough values, which only prevent a compile that a short run cannot amortize.
_FIRST_COMPILE_SECONDS = {True: 10.0, False: 4.0}  # on a GPU or not, of a small network, until one is measured
_AUTOTUNE_COST = 8.0  # the factor by which a compile takes longer if Inductor benchmarks kernels
_PLAUSIBLE_SPEEDUP = {True: 5.0, False: 2.0}  # the highest expected speedup over eager
_FURTHER_SPEEDUP = 1.25  # over the fastest candidate so far, and of `max_autotune` over the same candidate without it

Trials = Mapping[str, Trial]
"""The candidates by name, with eager."""


def undecided(trials: Trials) -> list[Trial]:
    """Return the candidates that may win, without eager."""
    return [trial for trial in trials.values() if trial.verdict == "undecided" and trial.variant.config is not None]


def fastest(trials: Trials) -> Trial | None:
    """Return the candidate that may win, or eager, that has the lowest median."""
    measured = [trial for trial in (trials[EAGER], *undecided(trials)) if trial.median_ms]
    return min(measured, key=_ms, default=None)


def why_not_compiled(trial: Trial, trials: Trials, steps_left: float, *, on_gpu: bool) -> tuple[str, bool]:
    """Return the reason why a candidate is not worth its compile time, or "" if it may be.

    The second value tells whether it would be tried in a longer run.
    """
    if (best := fastest(trials)) is None:
        return "", False
    costs = [each.facts.seconds / _cost(each) for each in trials.values() if each.facts and each.facts.seconds]
    seconds = max(costs, default=_FIRST_COMPILE_SECONDS[on_gpu]) * _cost(trial)
    lowest_ms = min(_ms(trials[EAGER]) / _PLAUSIBLE_SPEEDUP[on_gpu], _ms(best) / _FURTHER_SPEEDUP)
    if _autotunes(trial):
        # Tuning changes kernels. It does not change how they are launched: one by one, or by a CUDA graph.
        alike = [_ms(each) for each in undecided(trials) if _uses_cudagraphs(each) == _uses_cudagraphs(trial)]
        lowest_ms = (_ms(best) if min(alike) == math.inf else min(alike)) / _FURTHER_SPEEDUP
    saved_seconds = max(0.0, steps_left * (_ms(best) - lowest_ms) / 1000)
    reason = (
        f"the {max(0.0, steps_left):.0f} steps that remain could save {saved_seconds:.1f} s at best, as a step takes "
        f"{_ms(best):.2f} ms so far, and compiling takes about {seconds:.0f} s"
    )
    return ("", False) if saved_seconds >= seconds else (reason, lowest_ms < _ms(best))


def finalist(trials: Trials) -> Trial | None:
    """Return the fastest candidate that is faster than eager, and exclude the candidates that are not faster."""
    if (found := next((trial for trial in undecided(trials) if trial.rounds), None)) is not None:
        return found
    eager = trials[EAGER]
    for trial in undecided(trials):
        if (samples := min(len(trial.samples), len(eager.samples))) < MIN_SAMPLES:
            trial.decide("not compared", f"only {samples} steps can be compared")
        elif not _is_faster(trial, eager):
            trial.decide("not faster", _speedup(trial, eager))
    return min(undecided(trials), key=_ms, default=None)


def needs_round(trial: Trial, eager: Trial) -> bool:
    """Return whether another round of the final may decide."""
    if not trial.rounds:
        return True
    may_win = _lost_rounds(trial, eager) <= MAX_LOST_ROUNDS
    return may_win and trial.rounds < MAX_ROUNDS and not _is_clear(trial, eager)


def winner(trials: Trials, finalist: Trial | None) -> tuple[Trial, str | None]:
    """Return the finalist if it is faster than eager by more than noise, or else eager, and the reason.

    If disturbances are frequent, the finalist also wins if it lost at most `MAX_LOST_ROUNDS`. The blocks of a round ran
    after each other, so a disturbance that lasts for some rounds changes both.
    """
    eager = trials[EAGER]
    if finalist is not None:
        lost = _lost_rounds(finalist, eager)
        if _is_clear(finalist, eager):
            return finalist, None
        if finalist.rounds == MAX_ROUNDS and lost <= MAX_LOST_ROUNDS:
            won = f"it was faster than eager in {MAX_ROUNDS - lost} of {MAX_ROUNDS} rounds"
            return finalist, won
    for trial in undecided(trials):
        trial.decide("not faster", f"{_speedup(trial, eager)}, which is within noise")
    return eager, None


def _lost_rounds(trial: Trial, eager: Trial) -> int:
    """Return the number of rounds in which a finalist was not faster than eager by `MIN_SPEEDUP`."""
    rounds = zip(eager.blocks[-trial.rounds :], trial.blocks[-trial.rounds :], strict=True)
    medians = [(median_ms(theirs), median_ms(ours)) for theirs, ours in rounds]
    return sum(not (ours and theirs and ours * MIN_SPEEDUP < theirs) for theirs, ours in medians)


def _is_clear(trial: Trial, eager: Trial) -> bool:
    """Return whether a trial is faster than eager by `MIN_SPEEDUP` and by more than noise.

    Each block is a window of `compare`, so a disturbance of one block decides nothing.
    """
    comparison = compare(eager.blocks, trial.blocks, LEVEL)
    return comparison is not None and comparison.low > MIN_SPEEDUP


def _is_faster(trial: Trial, eager: Trial) -> bool:
    """Return whether the median is below eager's median by `MIN_SPEEDUP`. This ignores noise."""
    return _ms(trial) * MIN_SPEEDUP < _ms(eager)


def _speedup(trial: Trial, eager: Trial) -> str:
    return f"{_ms(eager) / _ms(trial):.2f} times as fast as eager"


def _ms(trial: Trial) -> float:
    return trial.median_ms or math.inf


def _cost(trial: Trial) -> float:
    """Return the expected compile time, divided by the compile time of the default mode."""
    return _AUTOTUNE_COST if _autotunes(trial) else 1.0


def _autotunes(trial: Trial) -> bool:
    config = trial.variant.config
    return config is not None and bool(config.resolved_options().get("max_autotune"))


def _uses_cudagraphs(trial: Trial) -> bool:
    return trial.variant.config is not None and trial.variant.config.uses_cudagraphs
