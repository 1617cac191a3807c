"""`savings`: the time that compiling saved so far, from the medians and the numbers of steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from compile_callbacks._utils.phases import WAITING
from compile_callbacks.profiling.comparison import MIN_SAMPLES

if TYPE_CHECKING:  # because ``compile-callbacks check`` does not import torch
    from compile_callbacks.profiling.step_times import PhaseTimes, StepTimes, Workload


class Savings(NamedTuple):
    """The time that compiling saved."""

    net_seconds: float  # the time saved by all steps, including steps in which torch compiled
    break_even_steps: float  # the compiled steps after which the net is positive; infinite if steps save no time


def savings(of_phase: PhaseTimes, variant: str | None = None, other_seconds: float = 0.0) -> Savings | None:
    """Return the time that compiled steps saved, or ``None`` if there is no factor between eager and compiled steps.

    Each compiled step saves the same share of its time: the share by which the medians of `PhaseTimes.times` differ. So
    the speedup, the net seconds and the break-even have the same sign. In a stage without eager steps, only the steps
    in which torch compiled count. The break-even is about steps of ``variant``. The time that steps of other candidates
    of a `Tune` lost is a cost, like ``other_seconds``.
    """
    reported = of_phase.times(variant)
    if len(reported.eager_ms) < MIN_SAMPLES or (reported.windows and _saved_share(reported) is None):
        return None
    eager_ms = _typical_ms({workload: (ms,) for workload, ms in of_phase.baseline().items()})
    cost_ms, saved_ms, count = other_seconds * 1000, 0.0, 0
    for key, steps, ms in of_phase.totals():
        if key.compiling:
            cost_ms += ms - steps * eager_ms.get(key.stage, 0.0)
        elif key.variant == WAITING:
            waiting_ms = _typical_ms(of_phase.windows(key.variant, key.kind))
            cost_ms += steps * (waiting_ms.get(key.stage, 0.0) - eager_ms.get(key.stage, 0.0)) if waiting_ms else 0.0
        elif key.kind != "eager" and key.stage in eager_ms:
            compiled_ms = _typical_ms(of_phase.windows(key.variant, key.kind)).get(key.stage, 0.0)
            share = _saved_share(of_phase.times(key.variant)) or 0.0
            if key.variant == variant:
                saved_ms, count = saved_ms + steps * compiled_ms * share, count + steps
            else:
                cost_ms -= steps * compiled_ms * share
    break_even_steps = max(0.0, cost_ms * count / saved_ms) if saved_ms > 0 else math.inf
    return Savings((saved_ms - cost_ms) / 1000, break_even_steps)


def _saved_share(times: StepTimes) -> float | None:
    """Return the saved time of a compiled step divided by its time, or ``None`` if the steps cannot be compared."""
    is_doubtful = times.comparison is not None and times.comparison.outcome == "not comparable"
    if not times.windows or len(times.eager_ms) < MIN_SAMPLES or is_doubtful:
        return None
    return statistics.median(times.eager_ms) / statistics.median(times.compiled_ms) - 1


def _typical_ms(samples: Mapping[Workload, Sequence[Sequence[float]]]) -> dict[str, float]:
    """Return the mean over the steps of each stage, in which each step counts with the median of its workload."""
    of_stage: defaultdict[str, list[float]] = defaultdict(list)
    for workload, windows in samples.items():
        ms = list(itertools.chain(*windows))
        of_stage[workload.stage] += [statistics.median(ms)] * len(ms)
    return {stage: statistics.fmean(ms) for stage, ms in of_stage.items()}
