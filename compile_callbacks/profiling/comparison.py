"""The only rule for "faster" and "slower": `compare`. The report, `Tune`, CC501, contracts and benchmarks use it.

Imports only the standard library, and uses no random numbers.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

MIN_SAMPLES = 5
"""The minimum number of eager and of compiled samples for a comparison, and of the samples in a window."""

MAX_WIDTH = 4.0
"""An interval whose upper end is more than this many times its lower end is too wide to help."""

MAX_FACTOR = 20.0
"""Medians that differ by a larger factor show a fault of the measurement, such as threads that wait for each other."""

_LEVEL = 0.95

_WINDOW_MARGIN = 1.1
"""The factor of the largest deviation of a window from the median. If the eager steps and a compiled window are in the
same disturbance, noise alone makes the eager steps the slower of the two in half of the cases."""

_MIN_TREND_WINDOWS = 5

_quantile = statistics.NormalDist().inv_cdf

Outcome = Literal["faster", "slower", "no difference", "not comparable"]


class Comparison(NamedTuple):
    """The ratio of the eager median to the compiled median, and its confidence interval."""

    ratio: float
    low: float
    high: float

    @property
    def outcome(self) -> Outcome:
        """The claim that the interval supports. Without such a claim, there is no factor either."""
        if self.high > MAX_WIDTH * self.low or not 1 / MAX_FACTOR <= self.ratio <= MAX_FACTOR:
            return "not comparable"
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "no difference"


def compare(
    eager: Sequence[Sequence[float]], compiled: Sequence[Sequence[float]], level: float = _LEVEL
) -> Comparison | None:
    """Compare the medians of eager and compiled step times. Return ``None`` if there are too few samples.

    A window contains the times of steps that ran after each other, and the eager baseline is one window. The interval
    has the confidence ``level``, and contains three intervals: for noise of single steps, for disturbances that last
    for many steps, and for drift. The page "How times are measured" describes them.

    Example::

        >>> compare([[4.0] * 5], [[2.0] * 5])
        Comparison(ratio=2.0, low=2.0, high=2.0)
    """
    if min(sum(map(len, windows)) for windows in (eager, compiled)) < MIN_SAMPLES:
        return None
    ours, theirs = _Side(compiled), _Side(eager)
    center = theirs.median - ours.median
    noise = _quantile((1 + level) / 2) * math.hypot(ours.error, theirs.error)
    below = max(noise, _WINDOW_MARGIN * (max(ours.deviations) - min(theirs.deviations)), noise + ours.trend)
    above = max(noise, _WINDOW_MARGIN * (max(theirs.deviations) - min(ours.deviations)), noise - ours.trend)
    return Comparison(math.exp(center), math.exp(center - below), math.exp(center + above))


class _Side:
    """The logarithms of the step times of one side."""

    def __init__(self, windows: Sequence[Sequence[float]]) -> None:
        chunks: list[list[float]] = []
        for window in windows:
            if chunks and len(chunks[-1]) < MIN_SAMPLES:  # steps of one shape may be few in each window
                chunks[-1] += window
            else:
                chunks.append(list(window))
        samples = sorted(itertools.chain(*chunks))
        self.median = math.log(statistics.median(samples))
        medians = [math.log(statistics.median(chunk)) for chunk in chunks if len(chunk) >= MIN_SAMPLES]
        self.deviations = [median - self.median for median in medians]
        # The standard error of the median (Price and Bonett, J. Statist. Comput. Simul. 68, 2001).
        rank, width = _ranks(len(samples))
        self.error = (math.log(samples[-rank]) - math.log(samples[rank - 1])) / width
        # The deviation before the first window by a linear regression, or 0 for too few windows.
        count, self.trend = len(medians), 0.0
        if count >= _MIN_TREND_WINDOWS:
            self.trend = statistics.linear_regression(range(1, count + 1), self.deviations).intercept


@functools.lru_cache
def _ranks(count: int) -> tuple[int, float]:
    """Return the rank of two order statistics from both ends, and their distance in standard errors of the median."""
    rank = max(1, round((count + 1) / 2 - math.sqrt(count)))
    outside = sum(math.comb(count, below) for below in range(rank)) / 2**count
    return rank, 2 * _quantile(1 - outside)


def median_ms(samples: Sequence[float]) -> float | None:
    """Return the median, or ``None`` if there are no samples."""
    return statistics.median(samples) if samples else None


def spread_ms(samples: Sequence[float]) -> float | None:
    """Return the interquartile range, which contains half of the samples, or ``None`` for fewer than four samples."""
    if len(samples) < 4:
        return None
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first
