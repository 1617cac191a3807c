"""Computes medians, spreads and confidence intervals of step times for the report and `Tune`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NOTCH = 2.5
"""Half the width of the interval around a median, in units of IQR / sqrt(n). McGill, Tukey and Larsen (Variations of
Box Plots, The American Statistician 32, 1978) use 1.57 for one comparison of two medians at the 95% level. `Tune`
compares after each block of steps, so its interval is wider."""

_MIN_NOTCH = 0.005  # the minimum, as a share of the median, because a few samples can be equal by accident

MIN_SAMPLES = 5
"""The minimum number of eager and of compiled samples for a comparison."""

_RESAMPLES = 1000


@dataclass(frozen=True)
class StepStats:
    """Statistics of steps of equal workload."""

    samples: int
    median_ms: float
    p95_ms: float
    notch_ms: float  # half the width of the interval around the median

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> StepStats | None:
        """Return the statistics of samples in milliseconds, or ``None`` if there are no samples.

        Example::

            >>> StepStats.of([4.0, 5.0, 6.0]).median_ms
            5.0
        """
        if not samples_ms:
            return None
        median = statistics.median(samples_ms)
        if len(samples_ms) < 2:
            return cls(1, median, median, math.inf)
        twentieths = statistics.quantiles(samples_ms, n=20, method="inclusive")
        spread = twentieths[14] - twentieths[4]
        notch = max(_NOTCH * spread / math.sqrt(len(samples_ms)), _MIN_NOTCH * median)
        return cls(len(samples_ms), median, twentieths[18], notch)

    def clearly_below(self, other: StepStats, factor: float = 1.0) -> bool:
        """Return whether the interval of this median, times ``factor``, is below the interval of the other median."""
        return (self.median_ms + self.notch_ms) * factor < other.median_ms - other.notch_ms


def median_ms(samples: Sequence[float]) -> float | None:
    """Return the median, or ``None`` if there are no samples."""
    return statistics.median(samples) if samples else None


def spread_ms(samples: Sequence[float]) -> float | None:
    """Return the interquartile range, which contains half of the samples, or ``None`` for fewer than four samples."""
    if len(samples) < 4:
        return None
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def speedup_interval(eager_ms: Sequence[float], compiled_ms: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the eager median divided by the compiled median, by a percentile bootstrap.

    The function draws from its own seeded generator, so the user's generators do not change.

    Example::

        >>> speedup_interval([4.0] * 5, [2.0] * 5)
        (2.0, 2.0)
    """
    generator = torch.Generator().manual_seed(0)

    def medians(samples_ms: Sequence[float]) -> torch.Tensor:
        values = torch.tensor(samples_ms, dtype=torch.float64, device="cpu")
        picks = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator, device="cpu")
        return values[picks].quantile(0.5, dim=1)

    ratios = medians(eager_ms) / medians(compiled_ms)
    return ratios.quantile(0.025).item(), ratios.quantile(0.975).item()
