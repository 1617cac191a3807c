"""`Trial`: the result of a candidate of a `Tune`. `compare` selects the steps to compare with eager steps."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from compile_callbacks.profiling.step_stats import StepStats
from compile_callbacks.profiling.workload import Workload

Verdict = Literal["undecided", "chosen", "beaten", "not faster", "not compared", "failed", "wrong", "not tried"]
"""The result of a candidate.

- ``"undecided"``: The result is not known yet.
- ``"chosen"``: The candidate won.
- ``"beaten"``: Another candidate is faster.
- ``"not faster"``: The candidate is not faster than eager by ``min_speedup`` and by more than noise.
- ``"not compared"``: Too few steps can be compared.
- ``"failed"``: The candidate did not compile.
- ``"wrong"``: The results of the candidate differ from eager.
- ``"not tried"``: The candidate was never compiled.
"""


class Block(NamedTuple):
    """The measurements of a block of steps."""

    times: Mapping[Workload, Sequence[float]]  # in milliseconds
    seconds: float  # including compile time
    compile_seconds: float = 0.0  # the compile time of the candidate so far
    problem: tuple[Verdict, str] | None = None  # the reason why the candidate cannot win
    steps: int = 0

    @classmethod
    def of_ranks(cls, blocks: Sequence[Block]) -> Block:
        """Return the block of all ranks: the step times of the slowest rank, and the problem of any rank."""

        def median_ms(block: Block) -> float:
            return statistics.median([ms for samples in block.times.values() for ms in samples] or [0.0])

        return cls(
            max(blocks, key=median_ms).times,
            max(block.seconds for block in blocks),
            max(block.compile_seconds for block in blocks),
            next((block.problem for block in blocks if block.problem is not None), None),
            blocks[0].steps,
        )


@dataclass
class Trial:
    """The result of one candidate."""

    candidate: str  # its settings in one line, or "eager"
    verdict: Verdict = "undecided"
    reason: str | None = None  # the reason for the verdict, if the numbers do not show it
    compile_seconds: float | None = None
    compile_cost: float = 1.0  # the expected compile time, divided by the compile time of the default mode
    stats: StepStats | None = None  # of the step times that can be compared
    times: defaultdict[Workload, list[float]] = field(default_factory=lambda: defaultdict(list))  # in milliseconds
    blocks: int = 0  # the number of blocks that ran with the candidate

    @property
    def samples(self) -> int:
        """The number of compared step times."""
        return 0 if self.stats is None else self.stats.samples

    def median_ms(self) -> float:
        """Return the median of the compared step times."""
        assert self.stats is not None
        return self.stats.median_ms

    def decide(self, verdict: Verdict, reason: str | None = None) -> None:
        """Set the result."""
        self.verdict, self.reason = verdict, reason

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, with the median and the 95th percentile of the compared step times."""
        return {
            "candidate": self.candidate,
            "verdict": self.verdict,
            "median_ms": self.stats and self.stats.median_ms,
            "p95_ms": self.stats and self.stats.p95_ms,
            "samples": self.samples,
            "compile_seconds": self.compile_seconds,
            "reason": self.reason,
        }


def compared_workload(steps: Counter[Workload]) -> Workload | None:
    """Return the workload to compare, or ``None`` if there are no steps.

    ``steps`` contains the number of eager steps by workload. If at least half of the eager steps have the same
    workload, that workload is returned. Otherwise, shapes vary: the returned workload has the most frequent stage and
    kind, but no shapes, and steps of all shapes are compared.
    """
    if not steps.total():
        return None
    usual, count = steps.most_common(1)[0]
    if 2 * count >= steps.total():
        return usual
    kinds: Counter[Workload] = Counter()
    for workload, count in steps.items():
        kinds[workload._replace(shapes=())] += count
    return kinds.most_common(1)[0][0]


def compare(trials: Sequence[Trial]) -> None:
    """Set the ``stats`` of all trials from the step times that can be compared. The first trial is eager.

    If shapes vary, the function fits a line to the eager step times as a function of the batch size. It then scales
    each step time to the usual batch size with this line. Otherwise, the variation of the batch sizes would hide a
    speedup of 2x.
    """
    eager = trials[0].times
    compared = compared_workload(Counter({workload: len(samples) for workload, samples in eager.items()}))
    pooled = compared not in eager
    points = [
        [(_size(w), ms) for w, samples in t.times.items() if compared in (w, w._replace(shapes=())) for ms in samples]
        for t in trials
    ]
    expected_ms = _line_through(points[0]) if pooled else lambda size: 1.0
    usual_ms = statistics.median([expected_ms(size) for size, _ in points[0]] or [1.0])
    for trial, found in zip(trials, points, strict=True):
        trial.stats = StepStats.of([ms * usual_ms / expected_ms(size) for size, ms in found])


def _line_through(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Return the Theil-Sen line through points: the expected time as a function of the size.

    The slope is the median slope of all pairs of points, and the intercept is also a median, so a few slow steps have
    little effect. The function never returns less than the lowest time of the points.
    """
    pairs = itertools.combinations(points[-100:], 2)  # the latest points, because all pairs would take seconds
    slope = statistics.median([(y - b) / (x - a) for (a, b), (x, y) in pairs if x != a] or [0.0])
    intercept = statistics.median([y - slope * x for x, y in points] or [1.0])
    lowest = min((y for _, y in points), default=1.0)
    return lambda size: max(intercept + slope * size, lowest)


def _size(workload: Workload) -> int:
    return sum(math.prod(shape) for shape in workload.shapes)
