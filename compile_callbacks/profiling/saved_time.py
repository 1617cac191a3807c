"""Summarizes long runs for `StepTimer`: `SavedTime` compares all steps with eager, `StepSeries` samples them."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

KEPT_STEPS = 500
"""The maximum number of points of a series, and of the curve of saved time."""


class StepSeries:
    """Step times in order. In a long run, the series keeps random steps, distributed evenly over the run.

    The steps are random, because every second or fourth step may differ from the others, as with gradient accumulation.
    """

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self._limit = limit
        self._points: list[tuple[int, float]] = []
        self._random = random.Random(0)  # a separate generator, because the user's generators must not change
        self._one_of = 1

    def add(self, step: int, ms: float) -> None:
        """Add a step."""
        if self._random.random() * self._one_of >= 1:
            return
        if len(self._points) == self._limit:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [self._random.choice(pair) for pair in pairs]
            self._one_of *= 2
        self._points.append((step, float(f"{ms:.4g}")))

    def read(self) -> tuple[list[int], list[float]]:
        """Return the numbers of the steps, and their milliseconds with four digits."""
        return [step for step, _ in self._points], [ms for _, ms in self._points]


class Savings(NamedTuple):
    """The time that compiling saved."""

    net_seconds: float  # the time saved by all steps, including steps in which torch compiled
    saved_seconds: float  # the time saved by the other steps
    break_even_steps: float  # the compiled steps after which the net is positive; infinite if steps save no time
    curve: list[tuple[int, float]]  # numbers of steps in the phase, and the net seconds after these steps


class _Key(NamedTuple):
    stage: str
    candidate: str | None
    compiling: bool


class _Bin:
    """Number and total milliseconds of consecutive steps, by stage, candidate, and whether torch compiled in them."""

    def __init__(self) -> None:
        self.last_step = self.size = 0
        self.steps: Counter[_Key] = Counter()
        self.ms: defaultdict[_Key, float] = defaultdict(float)

    def saved_ms(self, eager_ms: Mapping[str, float]) -> float:
        """Return the time that the steps saved. In a stage without eager steps, only the compile time counts."""
        found = 0.0
        for key, steps in self.steps.items():
            if key.stage in eager_ms:
                found += steps * eager_ms[key.stage] - self.ms[key]
            elif key.compiling:
                found -= self.ms[key]
        return found


class SavedTime:
    """Sums the times of all steps that did not run eagerly, in a limited number of bins."""

    def __init__(self) -> None:
        self._bins: list[_Bin] = []
        self._steps_per_bin = 1
        self._total = _Bin()

    def add(self, step: int, ms: float, *, stage: str, candidate: str | None = None, compiling: bool = False) -> None:
        """Add a step."""
        if not self._bins or self._bins[-1].size >= self._steps_per_bin:
            self._bins.append(_Bin())
        self._bins[-1].last_step = step
        self._bins[-1].size += 1
        self._add(_Key(stage, candidate, compiling), 1, ms)
        if len(self._bins) > KEPT_STEPS:
            self._merge_bins()

    def add_untimed(self, steps: int, *, stage: str, candidate: str | None = None) -> None:
        """Add untimed steps. Each step counts with the average time of its kind so far."""
        key = _Key(stage, candidate, False)
        if timed := self._total.steps[key]:
            self._add(key, steps, steps * self._total.ms[key] / timed)

    def savings(self, eager_ms: Mapping[str, float], other_seconds: float = 0.0) -> Savings | None:
        """Compare the steps with eager steps. Return ``None`` if no stage has eager steps."""
        if not any(key.stage in eager_ms for key in self._total.steps):
            return None
        net_ms, curve = -other_seconds * 1000, []
        for found in self._bins:
            net_ms += found.saved_ms(eager_ms)
            curve.append((found.last_step, float(f"{net_ms / 1000:.4g}")))
        count, saved_ms = 0, 0.0  # steps during which torch did not compile
        for key, steps in self._total.steps.items():
            if key.stage in eager_ms and not key.compiling:
                count, saved_ms = count + steps, saved_ms + steps * eager_ms[key.stage] - self._total.ms[key]
        break_even_steps = (saved_ms - net_ms) * count / saved_ms if saved_ms > 0 else math.inf
        return Savings(net_ms / 1000, saved_ms / 1000, max(0.0, break_even_steps), curve)

    def _add(self, key: _Key, steps: int, ms: float) -> None:
        for found in (self._bins[-1], self._total):
            found.steps[key] += steps
            found.ms[key] += ms

    def _merge_bins(self) -> None:
        for first, second in zip(self._bins[::2], self._bins[1::2], strict=False):
            second.size += first.size
            for key, steps in first.steps.items():
                second.steps[key] += steps
                second.ms[key] += first.ms[key]
        self._bins = self._bins[1::2] + (self._bins[-1:] if len(self._bins) % 2 else [])
        self._steps_per_bin *= 2
