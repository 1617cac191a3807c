"""What came of each candidate of a `Tune`, and the figures that it is judged by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compile_callbacks.measuring.by_size import BySize, pairs
from compile_callbacks.measuring.step_stats import StepStats
from compile_callbacks.measuring.work import Work
from compile_callbacks.settings.mode import EAGER
from compile_callbacks.settings.tune import Rule

BLOCK_SAMPLES = 5
"""Samples of a candidate before the next one's turn; fewer than these prove nothing about it."""

SAMPLES_FOR_CLEAR = 2 * BLOCK_SAMPLES
"""Samples from which on a candidate may clearly win or lose: two turns, of which one may have been a bad minute."""

Verdict = Literal["chosen", "beaten", "not faster", "not judged", "failed", "wrong", "not tried", "undecided"]
"""What came of a candidate: chosen; another one is better; not faster than eager by ``min_speedup``; too few of its
steps are comparable with eager's; failed to compile; computes something else than eager; never compiled; not judged
yet."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one candidate.

    Attributes:
        candidate: Its settings, in a line; ``"eager"`` for eager.
        verdict: What came of it.
        median_ms: Median of its steps, in milliseconds; ``None`` where there is no sample.
        high_ms: Their 95th percentile.
        samples: How many steps are behind these, all comparable with eager's: see `Scores`.
        compile_seconds: Time that compiling it took while it was tried.
        reason: Why, where the figures do not say so.
    """

    candidate: str
    verdict: Verdict = "undecided"
    median_ms: float | None = None
    high_ms: float | None = None
    samples: int = 0
    compile_seconds: float | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The trial as JSON-ready data."""
        return asdict(self)


@dataclass
class Candidate:
    """What is known of a candidate while it is tried.

    Attributes:
        name: Its settings, in a line.
        times: Its samples in milliseconds, by their work.
        steps: Steps that ran with it, samples or not.
        compile_seconds: Time that compiling it took.
        verdict: What came of it so far.
        reason: Why.
    """

    name: str
    times: dict[Work, Sequence[float]] = field(default_factory=dict)
    steps: int = 0
    compile_seconds: float = 0.0
    verdict: Verdict = "undecided"
    reason: str | None = None

    @property
    def out(self) -> bool:
        """Whether it is not to run again."""
        return self.verdict not in ("undecided", "chosen")

    def rule_out(self, verdict: Verdict, reason: str | None = None) -> None:
        """It is not to run again."""
        self.verdict, self.reason = verdict, reason


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known when it is asked whether a candidate is worth its compile.

    Attributes:
        steps_left: Steps of the phase that remain of the run, by its epochs and by its clock; infinite where neither is
            known.
        eager_ms: Median of an eager step, in milliseconds.
        best_ms: The lowest median of those that may still be chosen, eager among them.
        seconds_left: What is left of ``budget_seconds``; infinite without a budget.
        compile_seconds: What compiling the others took, by name.
    """

    steps_left: float
    eager_ms: float
    best_ms: float
    seconds_left: float = math.inf
    compile_seconds: Mapping[str, float] = field(default_factory=dict)


class Scores:
    """Compares candidates by their steps' times, with eager and with each other, as a rule demands.

    Compared are steps of equal work, that which most of eager's steps did. Where hardly two of these did the same,
    because shapes vary, times are given as for the usual batch, see `BySize`.

    Args:
        rule: As `Tune` takes it.
        steps: As `Tune` takes it.
        min_speedup: As `Tune` takes it.
        latency_budget_ms: As `Tune` takes it.
        candidates: The candidates by name, eager among them.
    """

    def __init__(
        self,
        rule: Rule,
        steps: int,
        min_speedup: float,
        latency_budget_ms: float | None,
        candidates: Mapping[str, Candidate],
    ) -> None:
        self._by_median = rule in ("throughput", "first")
        self._steps = steps
        self._min_speedup = min_speedup
        self._latency_budget_ms = latency_budget_ms
        self._candidates = candidates

    def stats(self, name: str) -> StepStats | None:
        """The figures of a candidate; ``None`` where it has no sample of the work that is compared."""
        eager, own = self._candidates[EAGER].times, self._candidates[name].times
        if (by_size := BySize.of(eager)) is not None:
            return StepStats.of(by_size.eager_ms() if name == EAGER else by_size.scaled_ms(pairs(own)))
        # Of several the one that was done last.
        work = max(reversed(eager), key=lambda work: len(eager[work]), default=None)
        return None if work is None else StepStats.of(own.get(work, ()))

    @property
    def by_size(self) -> bool:
        """Whether shapes vary, so that steps are compared by the size of their batches."""
        return BySize.of(self._candidates[EAGER].times) is not None

    def samples(self, name: str) -> int:
        """How many samples a candidate has of the work that is compared."""
        stats = self.stats(name)
        return 0 if stats is None else stats.samples

    def proven(self, name: str) -> bool:
        """Whether a candidate and eager have the samples without which it is not chosen."""
        return self._both_have(name, BLOCK_SAMPLES)

    def measure_ms(self, name: str) -> float:
        """What the rule looks at, of a candidate that has samples."""
        stats = self.stats(name)
        assert stats is not None
        return stats.median_ms if self._by_median else stats.high_ms

    def passes(self, name: str) -> bool:
        """Whether a candidate beats eager: by ``min_speedup`` in what the rule looks at, and by its median at all."""
        stats, eager = self.stats(name), self.stats(EAGER)
        if stats is None or eager is None:
            return False
        beats = self.measure_ms(name) * self._min_speedup <= self.measure_ms(EAGER)
        return beats and stats.median_ms <= eager.median_ms

    def clearly_passes(self, name: str) -> bool:
        """Whether a candidate's median is below eager's by ``min_speedup``, beyond what noise explains."""
        return self._clear(name, EAGER, self._min_speedup) and self.passes(name)

    def clearly_fails(self, name: str) -> bool:
        """Whether a candidate's median is above what every rule demands, beyond what noise explains."""
        return self._clear(EAGER, name, 1 / self._min_speedup if self._by_median else 1)

    def clearly_beats(self, name: str, other: str) -> bool:
        """Whether a candidate is better than another, beyond what noise explains."""
        stats = self.stats(name)
        if not self._clear(name, other) or stats is None:
            return False
        # A high percentile takes more samples than a median: the other loses where its usual step is this one's worst.
        slower = self.stats(other)
        return self._by_median or (slower is not None and stats.high_ms < slower.median_ms - slower.notch_ms)

    def within_latency_budget(self, name: str) -> bool:
        """Whether a candidate's steps take no longer than ``latency_budget_ms``, but for one in twenty."""
        stats = self.stats(name)
        return stats is not None and self._latency_budget_ms is not None and stats.high_ms <= self._latency_budget_ms

    def speedup_in_words(self, name: str) -> str:
        """How a candidate compares with eager."""
        stats, eager = self.stats(name), self.stats(EAGER)
        assert stats is not None
        assert eager is not None
        words = f"{eager.median_ms / stats.median_ms:.2f} times as fast as eager"
        return words if self._by_median else f"{words}, {eager.high_ms / stats.high_ms:.2f} at the 95th percentile"

    def _clear(self, fast: str, slow: str, factor: float = 1.0) -> bool:
        a, b = self.stats(fast), self.stats(slow)
        enough = self._both_have(fast, SAMPLES_FOR_CLEAR) and self._both_have(slow, SAMPLES_FOR_CLEAR)
        return a is not None and b is not None and enough and a.clearly_below(b, factor)

    def _both_have(self, name: str, samples: int) -> bool:
        wanted = min(samples, self._steps)
        return self.samples(name) >= wanted and self.samples(EAGER) >= wanted
