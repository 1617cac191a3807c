"""The rule of a `Contest`: which candidate is worth its compile time, and which wins against eager."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from compile_callbacks._utils.phases import EAGER
from compile_callbacks.profiling.comparison import MIN_SAMPLES, compare
from compile_callbacks.tuning.candidates import Trial

LEVEL = 0.99
"""The confidence level of the comparison with eager. It is stricter than in the report, because a `Tune` compares each
candidate with eager, and one false result of them is enough for a wrong choice."""

MIN_SPEEDUP = 1.01
"""The speedup over eager that a candidate needs."""

MAX_ROUNDS = 10
"""The number of rounds, if no earlier round decides."""

ROUNDS = 3
"""The number of rounds that compare the only config of a phase with eager, with ``background=True``."""

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
    """Return the candidates that may win, without eager, the fastest first, and last those without a sample."""
    found = [trial for trial in trials.values() if trial.verdict == "undecided" and trial.variant.config is not None]
    return sorted(found, key=lambda trial: trial.ms)


def why_not_compiled(trial: Trial, trials: Trials, steps_left: float, *, on_gpu: bool) -> str:
    """Return the reason why a candidate is not worth its compile time, or "" if it may be."""
    eager_ms, fastest_ms = trials[EAGER].ms, min((each.ms for each in undecided(trials)), default=math.inf)
    best_ms = min(eager_ms, fastest_ms)
    if best_ms == math.inf:
        return ""
    known = [each.facts.seconds for each in trials.values() if each.facts and each.facts.seconds]
    seconds = max(known, default=_FIRST_COMPILE_SECONDS[on_gpu]) * (_AUTOTUNE_COST if trial.autotunes else 1.0)
    # Autotuning changes kernels. It does not change how they are launched: one by one, or by a CUDA graph.
    plausible_ms = math.inf if trial.autotunes else eager_ms / _PLAUSIBLE_SPEEDUP[on_gpu]
    lowest_ms = min(plausible_ms, (fastest_ms if trial.autotunes else best_ms) / _FURTHER_SPEEDUP)
    saved_seconds = max(0.0, steps_left * (best_ms - lowest_ms) / 1000)
    if saved_seconds >= seconds:
        return ""
    return (
        f"the {max(0.0, steps_left):.0f} steps that remain could save {saved_seconds:.1f} s at best, as a step takes "
        f"{best_ms:.2f} ms so far, and compiling takes about {seconds:.0f} s"
    )


def finalist(trials: Trials) -> Trial | None:
    """Return the fastest candidate that is faster than eager, and exclude the candidates that are not faster."""
    if (found := next((trial for trial in undecided(trials) if trial.rounds), None)) is not None:
        return found
    eager = trials[EAGER]
    for trial in undecided(trials):
        if (samples := min(len(trial.samples), len(eager.samples))) < MIN_SAMPLES:
            trial.decide("not compared", f"only {samples} steps can be compared")
        elif trial.ms * MIN_SPEEDUP >= eager.ms:
            trial.decide("not faster", speedup(trial, eager))
    return next(iter(undecided(trials)), None)


def wins(trial: Trial, eager: Trial) -> bool | None:
    """Return whether a candidate of a `Tune` is chosen, or ``None`` if another round may decide.

    It must be faster than eager by `MIN_SPEEDUP` and by more than noise. Each block is a window of `compare`, so a
    disturbance of one block decides nothing. If disturbances are frequent, the candidate also wins if it lost at most
    `MAX_LOST_ROUNDS`: the blocks of a round ran after each other, so a disturbance of some rounds changes both.
    """
    comparison = compare(eager.blocks, trial.blocks, LEVEL) if trial.rounds else None
    if comparison is not None and comparison.low > MIN_SPEEDUP:
        return True
    rounds = list(zip(reversed(eager.blocks), reversed(trial.blocks), strict=False))[: trial.rounds]
    lost = sum(not (ours and theirs and median(ours) * MIN_SPEEDUP < median(theirs)) for theirs, ours in rounds)
    return False if lost > MAX_LOST_ROUNDS else True if trial.rounds == MAX_ROUNDS else None


def stays(trial: Trial, eager: Trial) -> bool | None:
    """Return whether the only config of a phase stays, or ``None`` before the last round."""
    comparison = compare(eager.blocks, trial.blocks)
    return None if trial.rounds < ROUNDS else comparison is None or comparison.outcome != "slower"


def speedup(trial: Trial, eager: Trial) -> str:
    """Describe the ratio of the medians."""
    return f"{eager.ms / trial.ms:.2f} times as fast as eager"
