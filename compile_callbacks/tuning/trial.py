"""`Trial`: a candidate of a `Tune` and the blocks of steps in which it was measured."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from compile_callbacks.config.inductor_config import Variant
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.steps import Workload

Verdict = Literal["undecided", "chosen", "beaten", "not faster", "not compared", "failed", "wrong", "not tried"]
"""The result of a candidate. ``"not faster"``: not faster than eager by 1% and by more than noise.
``"not compared"``: too few steps can be compared. ``"not tried"``: never compiled.
"""


class Block(NamedTuple):
    """The measurements of a block of steps with one candidate."""

    milliseconds: Sequence[float]  # of the steps that can be compared
    compile_seconds: float = 0.0  # the compile time of the candidate so far
    problem: tuple[Verdict, str] | None = None  # the reason why the candidate cannot win
    steps: int = 0
    graphs: int = 0  # the number of compiled graphs of the candidate so far
    breaks: int = 0  # the number of its graph breaks
    healing: tuple[str, ...] = ()  # the settings of Dynamo that may remove some of them
    settled: bool = False  # whether torch compiled nothing, except that it may have recorded CUDA graphs
    unseen_shapes_ms: Sequence[float] = ()  # of the steps that can be compared, but are the first with their shapes


@dataclass
class Trial:
    """The result of one candidate."""

    variant: Variant
    verdict: Verdict = "undecided"
    reason: str | None = None  # the reason for the verdict, if the numbers do not show it
    compile_seconds: float | None = None
    blocks: list[Sequence[float]] = field(default_factory=list)  # the step times of each block, in milliseconds
    graphs: int = 0
    breaks: int = 0
    unhealed: Trial | None = None  # the same candidate without the settings that remove graph breaks

    def healed(self, settings: Sequence[str]) -> Trial:
        """Return a candidate with the same settings, and with these settings of Dynamo."""
        assert self.variant.config is not None
        config = replace(self.variant.config, dynamo=dict.fromkeys(settings, True))
        return Trial(Variant(config, config.describe(), healed=True), unhealed=self)

    @property
    def healing(self) -> tuple[str, ...]:
        """The settings of Dynamo that the candidate has, if it is a healed one."""
        return () if self.unhealed is None or self.variant.config is None else tuple(self.variant.config.dynamo)

    def effect(self) -> str | None:
        """Return the effect of the settings of a healed candidate, or ``None`` for other candidates."""
        base = self.unhealed
        if base is None or not base.breaks:
            return None
        # The blocks of a final have no counterpart in the base.
        before, after = base.median_ms, median_ms(list(itertools.chain(*self.blocks[: len(base.blocks)])))
        faster = f": {before / after:.1f}x" if before and after else ""
        count = base.breaks - self.breaks
        return f"{', '.join(self.healing)} removed {count} of {base.breaks} graph breaks{faster}"

    @property
    def candidate(self) -> str:
        """The settings in one line, or ``"eager"``."""
        return str(self.variant.name)

    @property
    def samples(self) -> list[float]:
        """The compared step times, in milliseconds."""
        return list(itertools.chain(*self.blocks))

    @property
    def median_ms(self) -> float | None:
        """The median of the compared step times, or ``None`` without a sample."""
        return median_ms(self.samples)

    def decide(self, verdict: Verdict, reason: str | None = None) -> None:
        """Set the result."""
        self.verdict, self.reason = verdict, reason

    def to_dict(self) -> dict[str, Any]:
        """Return the trial as JSON-ready data, with the median and the 95th percentile of the compared step times."""
        samples = self.samples
        twentieths = statistics.quantiles(samples, n=20, method="inclusive") if len(samples) > 1 else samples * 20
        return {
            "candidate": self.candidate,
            "verdict": self.verdict,
            "median_ms": self.median_ms,
            "p95_ms": twentieths[18] if twentieths else None,
            "samples": len(samples),
            "compile_seconds": self.compile_seconds,
            "reason": self.reason,
        }


def compared_workload(steps: Counter[Workload]) -> Workload:
    """Return the workload to compare, from the number of eager steps of each workload.

    If less than half of the steps have the same workload, shapes vary. Then, the result has the most frequent stage and
    kind, but no shapes, and steps of all shapes are compared.
    """
    usual, count = steps.most_common(1)[0]
    if 2 * count >= steps.total():
        return usual
    kinds: Counter[Workload] = Counter()
    for workload, count in steps.items():
        kinds[workload._replace(shapes=())] += count
    return kinds.most_common(1)[0][0]
