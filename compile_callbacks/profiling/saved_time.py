"""Summarizes runs for `StepTimer`: `SavedTime` compares all steps with eager, `StepSeries` samples them."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

KEPT_STEPS = 500
"""The maximum number of points of a series."""


class StepSeries:
    """Step times in order. In a long run, the series keeps random steps, each with the same probability.

    The steps are random, because every second or fourth step may differ from the others, as with gradient accumulation.
    """

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self._limit = limit
        self._points: list[tuple[int, float]] = []
        self._random = random.Random(0)  # a separate generator, because the user's generators must not change
        self._added = 0

    def add(self, step: int, ms: float) -> None:
        """Add a step."""
        self._added += 1
        place = len(self._points) if self._added <= self._limit else self._random.randrange(self._added)
        if place < self._limit:
            self._points[place : place + 1] = [(step, float(f"{ms:.4g}"))]

    def read(self) -> tuple[list[int], list[float]]:
        """Return the numbers of the steps, and their milliseconds with four digits."""
        points = sorted(self._points)
        return [step for step, _ in points], [ms for _, ms in points]


class Savings(NamedTuple):
    """The time that compiling saved."""

    net_seconds: float  # the time saved by all steps, including steps in which torch compiled
    break_even_steps: float  # the compiled steps after which the net is positive; infinite if steps save no time


class _Key(NamedTuple):
    stage: str
    candidate: str | None
    compiling: bool


class SavedTime:
    """Number and total milliseconds of the steps that did not run eagerly, by stage, candidate, and compile."""

    def __init__(self) -> None:
        self._steps: Counter[_Key] = Counter()
        self._ms: defaultdict[_Key, float] = defaultdict(float)

    def add(self, ms: float, *, stage: str, candidate: str | None = None, compiling: bool = False) -> None:
        """Add a step."""
        key = _Key(stage, candidate, compiling)
        self._steps[key] += 1
        self._ms[key] += ms

    def add_untimed(self, steps: int, *, stage: str, candidate: str | None = None) -> None:
        """Add untimed steps. Each step counts with the average time of its kind so far."""
        key = _Key(stage, candidate, False)
        if timed := self._steps[key]:
            self._ms[key] += steps * self._ms[key] / timed
            self._steps[key] += steps

    def savings(self, eager_ms: Mapping[str, float], other_seconds: float = 0.0) -> Savings | None:
        """Compare the steps with eager steps. Return ``None`` if no stage has eager steps.

        In a stage without eager steps, only the steps in which torch compiled count.
        """
        if not any(key.stage in eager_ms for key in self._steps):
            return None
        net_ms, saved_ms, count = -other_seconds * 1000, 0.0, 0
        for key, steps in self._steps.items():
            if key.stage in eager_ms:
                ms = steps * eager_ms[key.stage] - self._ms[key]
                net_ms += ms
                if not key.compiling:
                    count, saved_ms = count + steps, saved_ms + ms
            elif key.compiling:
                net_ms -= self._ms[key]
        break_even_steps = (saved_ms - net_ms) * count / saved_ms if saved_ms > 0 else math.inf
        return Savings(net_ms / 1000, max(0.0, break_even_steps))


def net_series(series: Sequence[Mapping[str, Any]], net_seconds: float, other_seconds: float) -> dict[str, Any]:
    """Return numbers of steps in a phase, and the net seconds saved after them, from `StepTimer.series`.

    A series of a long run does not contain each step. A step that it does not contain counts with the time of the next
    step of the series. All steps are compared with the eager time with which the curve ends at ``net_seconds``.
    """
    points = sorted((step, ms, of["kind"]) for of in series for step, ms in zip(of["steps"], of["ms"], strict=True))
    counted, last, missing = list[tuple[int, float, int]](), 0, 0
    for step, ms, kind in points:
        missing, last = missing + step - last - 1, step
        if kind == "eager":
            missing = 0
        elif kind == "compiling":
            counted.append((step, ms, 1))
        else:
            counted.append((step, ms, missing + 1))
            missing = 0
    total_ms = sum(ms * steps for _, ms, steps in counted)
    eager_ms = ((net_seconds + other_seconds) * 1000 + total_ms) / max(1, sum(steps for *_, steps in counted))
    saved_ms, seconds = -other_seconds * 1000, []
    for _, ms, steps in counted:
        saved_ms += steps * (eager_ms - ms)
        seconds.append(float(f"{saved_ms / 1000:.4g}"))
    return {"steps": [step for step, *_ in counted], "seconds": seconds}
