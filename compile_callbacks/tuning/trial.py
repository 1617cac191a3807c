"""The result of each candidate of a `Tune`, and which of its steps are compared with eager's."""

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
"""The result of a candidate: none yet; it won; it lost to another one; it is not faster than eager by ``min_speedup``
beyond noise; too few of its steps can be compared; it did not compile; its results differ; it was never compiled."""


class Block(NamedTuple):
    """The measurements of a block: its samples in milliseconds, how long it took, the compile time of the candidate.

    ``problem`` tells why the candidate cannot win, if it failed or computes something else.
    """

    times: Mapping[Workload, Sequence[float]]
    seconds: float
    compile_seconds: float = 0.0
    problem: tuple[Verdict, str] | None = None

    @classmethod
    def of_ranks(cls, blocks: Sequence[Block]) -> Block:
        """The block of all ranks: the samples of the slowest one, and the problem of any."""
        return cls(
            max((block.times for block in blocks), key=_median_ms),
            max(block.seconds for block in blocks),
            max(block.compile_seconds for block in blocks),
            next((block.problem for block in blocks if block.problem is not None), None),
        )


@dataclass
class Trial:
    """The result of one candidate.

    Attributes:
        candidate: Its settings, in one line; ``"eager"`` for eager.
        verdict: The result.
        reason: The reason, if the numbers do not show it.
        compile_seconds: Time spent compiling it; ``None`` if it was never compiled.
        stats: Median and percentiles of the step times that are compared; ``None`` without such times.
        times: All of its step times, in milliseconds, by the workload of the step.
        blocks: Number of blocks that ran with it.
    """

    candidate: str
    verdict: Verdict = "undecided"
    reason: str | None = None
    compile_seconds: float | None = None
    stats: StepStats | None = None
    times: defaultdict[Workload, list[float]] = field(default_factory=lambda: defaultdict(list))
    blocks: int = 0

    @property
    def samples(self) -> int:
        """Number of step times that are compared."""
        return 0 if self.stats is None else self.stats.samples

    def median_ms(self) -> float:
        """The median of the step times that are compared."""
        assert self.stats is not None
        return self.stats.median_ms

    def decide(self, verdict: Verdict, reason: str | None = None) -> None:
        """Set the result."""
        self.verdict, self.reason = verdict, reason

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON-ready data: ``median_ms`` and ``p95_ms`` (95th percentile) are those of the samples."""
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
    """The workload whose steps are compared, given how often eager steps did each; ``None`` if there are no steps.

    Steps of equal workload are compared if they are at least half of the eager steps. Otherwise shapes vary, and steps
    of the most frequent stage and kind are pooled with all their shapes; the returned workload then has no shapes.
    """
    if not steps.total():
        return None
    usual, count = steps.most_common(1)[0]
    if 2 * count >= steps.total():
        return usual
    kinds: Counter[Workload] = Counter()
    for workload, count in steps.items():
        kinds[Workload(workload.stage, workload.kind)] += count
    return kinds.most_common(1)[0][0]


def compare(trials: Sequence[Trial]) -> None:
    """Set the ``stats`` of all trials from the samples that can be compared. The first trial is eager's.

    Pooled samples are scaled to the usual batch size, by a line through the eager step times over the batch sizes.
    Candidates run in interleaved blocks, so that each of them gets its share of all shapes; but without the line, the
    spread of the sizes would hide a speedup of two.
    """
    eager = trials[0].times
    compared = compared_workload(Counter({workload: len(samples) for workload, samples in eager.items()}))
    found = [
        [
            (workload, ms)
            for workload, samples in trial.times.items()
            if compared in (workload, Workload(*workload[:2]))
            for ms in samples
        ]
        for trial in trials
    ]
    line = (
        _line_through([(_size(workload), ms) for workload, ms in found[0]])
        if compared not in eager
        else lambda size: 1.0
    )
    usual_ms = statistics.median([line(_size(workload)) for workload, _ in found[0]] or [1.0])
    for trial, samples in zip(trials, found, strict=True):
        trial.stats = StepStats.of([ms * usual_ms / line(_size(workload)) for workload, ms in samples])


def _line_through(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """The Theil-Sen line (medians of slopes and intercepts, which ignore outliers), not below the lowest point."""
    pairs = itertools.combinations(points[-100:], 2)  # more would take seconds
    slope = statistics.median([(y - b) / (x - a) for (a, b), (x, y) in pairs if x != a] or [0.0])
    intercept = statistics.median([y - slope * x for x, y in points] or [1.0])
    lowest = min((y for _, y in points), default=1.0)
    return lambda size: max(intercept + slope * size, lowest)


def _size(workload: Workload) -> int:
    return sum(math.prod(shape) for shape in workload.shapes)


def _median_ms(times: Mapping[Workload, Sequence[float]]) -> float:
    return statistics.median([sample for samples in times.values() for sample in samples] or [0.0])
