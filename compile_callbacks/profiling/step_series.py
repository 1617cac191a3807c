"""Step times in the order of the run, thinned out so that a month of training does not fill the memory."""

from __future__ import annotations

import random
from typing import Protocol

KEPT_STEPS = 500
"""Steps kept of each way of running, at most: spread evenly over the run, so that a curve can be drawn of them."""


class Span(Protocol):
    """The time of a step; on a GPU known once the GPU has passed its end."""

    def passed(self) -> bool:
        """Whether it is known."""

    def milliseconds(self) -> float:
        """The time; waits for the GPU."""


class StepSeries:
    """Steps that ran in one way: one of each so many, and of how many doubles whenever there are too many.

    Which one is left to chance: every second or fourth step may be one of its own kind, as in an accumulation of
    gradients.

    Args:
        limit: Steps kept, an even number.
    """

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self._limit = limit
        self._points: list[tuple[int, Span | float]] = []
        self._chance = random.Random(0)  # nobody else's numbers change
        self._of_each = 1
        self._seen = self._taken = 0

    def add(self, step: int, span: Span) -> None:
        """A step is done.

        Args:
            step: Its number in the phase.
            span: Its time.
        """
        if self._seen == self._taken:
            self._points.append((step, span))
        self._seen += 1
        if self._seen < self._of_each:
            return
        if len(self._points) == self._limit:
            self._points = [
                self._chance.choice(pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)
            ]
            self._points = [(at, _known(time)) for at, time in self._points]
            self._of_each *= 2
        self._seen, self._taken = 0, self._chance.randrange(self._of_each) if self._of_each > 1 else 0

    def read(self) -> list[tuple[int, float]]:
        """The steps kept, with their milliseconds to four digits; waits for the GPU."""
        self._points = [(step, time if isinstance(time, float) else time.milliseconds()) for step, time in self._points]
        return [(step, float(f"{time:.4g}")) for step, time in self._points if isinstance(time, float)]


def _known(time: Span | float) -> Span | float:
    """The milliseconds where that takes no waiting: what a GPU has passed needs no events any more."""
    return time if isinstance(time, float) or not time.passed() else time.milliseconds()
