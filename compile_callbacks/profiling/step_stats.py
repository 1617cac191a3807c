"""Step times of one candidate in figures, and when one is clearly below another."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NOTCH = 2.5
"""Half the width of the interval around a median, in IQR / sqrt(n). McGill, Tukey and Larsen (Variations of Box Plots,
The American Statistician 32, 1978) give 1.57 for two medians that differ at the 95% level, once; here they are looked
at after every block of steps."""

_LEAST_NOTCH = 0.005  # of the median: a few samples can agree by accident

SAMPLES_FOR_SPEEDUP = 5
"""A speedup needs this many eager and this many compiled samples."""

_RESAMPLES = 1000


@dataclass(frozen=True)
class StepStats:
    """Step times of equal workload.

    Attributes:
        samples: How many steps.
        median_ms: Their median, in milliseconds.
        p95_ms: Their 95th percentile.
        notch_ms: The median is known to plus or minus so much.
    """

    samples: int
    median_ms: float
    p95_ms: float
    notch_ms: float

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> StepStats | None:
        """The figures of samples in milliseconds; ``None`` of nothing.

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
        notch = max(_NOTCH * spread / math.sqrt(len(samples_ms)), _LEAST_NOTCH * median)
        return cls(len(samples_ms), median, twentieths[18], notch)

    def clearly_below(self, other: StepStats, factor: float = 1.0) -> bool:
        """Whether this median, times ``factor``, is below the other's beyond what noise explains."""
        return (self.median_ms + self.notch_ms) * factor < other.median_ms - other.notch_ms


def speedup_interval(eager_ms: Sequence[float], compiled_ms: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the eager median divided by the compiled median, by a percentile bootstrap.

    Uses its own seeded generator, so the same samples give the same interval and no random state of the user changes.

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
