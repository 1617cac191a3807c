"""`Trial`: the result of a candidate of a `Tune`."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from compile_callbacks.config.variant import Variant
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
    """The measurements of a block of steps with one candidate."""

    milliseconds: Sequence[float]  # of the steps that can be compared
    seconds: float  # of all steps, including compile time
    compile_seconds: float = 0.0  # the compile time of the candidate so far
    problem: tuple[Verdict, str] | None = None  # the reason why the candidate cannot win
    steps: int = 0


@dataclass
class Trial:
    """The result of one candidate."""

    variant: Variant
    verdict: Verdict = "undecided"
    reason: str | None = None  # the reason for the verdict, if the numbers do not show it
    compile_seconds: float | None = None
    compile_cost: float = 1.0  # the expected compile time, divided by the compile time of the default mode
    blocks: list[Sequence[float]] = field(default_factory=list)  # the step times of each block, in milliseconds

    @property
    def candidate(self) -> str:
        """The settings in one line, or ``"eager"``."""
        return str(self.variant.name)

    @property
    def stats(self) -> StepStats | None:
        """The statistics of all compared steps, or ``None`` without a sample."""
        return StepStats.of(list(itertools.chain(*self.blocks)))

    @property
    def last_stats(self) -> StepStats | None:
        """The statistics of the last block."""
        return StepStats.of(self.blocks[-1]) if self.blocks else None

    @property
    def samples(self) -> int:
        """The number of compared step times."""
        return sum(map(len, self.blocks))

    def decide(self, verdict: Verdict, reason: str | None = None) -> None:
        """Set the result."""
        self.verdict, self.reason = verdict, reason

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, with the median and the 95th percentile of the compared step times."""
        stats = self.stats
        return {
            "candidate": self.candidate,
            "verdict": self.verdict,
            "median_ms": stats and stats.median_ms,
            "p95_ms": stats and stats.p95_ms,
            "samples": self.samples,
            "compile_seconds": self.compile_seconds,
            "reason": self.reason,
        }


def compared_workload(steps: Counter[Workload]) -> Workload:
    """Return the workload to compare, from the number of eager steps of each workload.

    If at least half of the steps have the same workload, this workload is returned. Otherwise, shapes vary: the
    returned workload has the most frequent stage and kind, but no shapes, and steps of all shapes are compared.
    """
    usual, count = steps.most_common(1)[0]
    if 2 * count >= steps.total():
        return usual
    kinds: Counter[Workload] = Counter()
    for workload, count in steps.items():
        kinds[workload._replace(shapes=())] += count
    return kinds.most_common(1)[0][0]
