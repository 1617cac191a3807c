"""Step times where hardly two batches have the same shapes: compared with eager steps of about the same size."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from compile_callbacks.measuring.work import SIMILAR_SIZE, Work, is_varied

_T = TypeVar("_T")

_NEIGHBOURS = 5  # eager samples nearest in size, whose median is what eager takes for a batch
_LEAST_NEIGHBOURS = 3
_MOST_EAGER, _MOST_OTHERS = 200, 1000  # samples that are looked at


class BySize:
    """What eager steps take for a batch of some size, by those that were measured.

    Other steps' times are given as for the usual batch, the median of eager's: times eager's median, over what eager
    takes for a batch of their size.

    Args:
        work: The work, of any size.
        eager: Sizes in elements of the batch, and milliseconds.
    """

    def __init__(self, work: Work, eager: Iterable[tuple[int, float]]) -> None:
        self.work = work
        self._eager = _evenly(sorted(eager), _MOST_EAGER)
        self.reference_ms = statistics.median(ms for _, ms in self._eager)
        """What eager takes for the usual batch."""

    @classmethod
    def of(cls, eager: Mapping[Work, Sequence[float]], beside: Iterable[Work] | None = None) -> BySize | None:
        """Of the kind of work that most samples are of; ``None`` where eager's have a usual work, or are few.

        Steps of shapes that are new are compared with each other, where there are not enough others.

        Args:
            eager: Milliseconds by their work, the latest last.
            beside: What else was done, each time: that kind is taken of which there is most on both sides.
        """
        kinds: defaultdict[Work, Counter[Work]] = defaultdict(Counter)
        for work, samples in eager.items():
            if work.shapes:
                kinds[work.of_any_size][work] = len(samples)
        others = None if beside is None else Counter(work.of_any_size for work in beside)

        def samples_of(kind: Work) -> tuple[bool, int]:
            samples = kinds[kind].total() if others is None else min(kinds[kind].total(), others[kind])
            return not kind.new and samples > _LEAST_NEIGHBOURS, samples

        kind = max(reversed(kinds), key=samples_of, default=None)
        if kind is None or not is_varied(kinds[kind]) or kinds[kind].total() <= _LEAST_NEIGHBOURS:
            return None
        return cls(kind, ((work.elements, ms) for work in kinds[kind] for ms in eager[work]))

    def eager_ms(self) -> tuple[float, ...]:
        """Eager's samples as for the usual batch, each by the others."""
        found = []
        for number, (elements, ms) in enumerate(self._eager):
            expected_ms = self._expected_ms(elements, self._eager[:number] + self._eager[number + 1 :])
            if expected_ms is not None:
                found.append(ms * self.reference_ms / expected_ms)
        return tuple(found)

    def scaled_ms(self, samples: Iterable[tuple[Work, float]]) -> tuple[float, ...]:
        """Samples as for the usual batch, without those of other kinds, and of sizes that eager ran nothing near.

        Args:
            samples: Works and milliseconds.
        """
        found = []
        for work, ms in samples:
            if work.of_any_size == self.work:
                expected_ms = self._expected_ms(work.elements, self._eager)
                if expected_ms is not None:
                    found.append(ms * self.reference_ms / expected_ms)
        return tuple(found)

    def _expected_ms(self, elements: int, eager: Sequence[tuple[int, float]]) -> float | None:
        similar = [
            point for point in eager if elements <= SIMILAR_SIZE * point[0] and point[0] <= SIMILAR_SIZE * elements
        ]
        nearest = sorted(similar, key=lambda point: abs(point[0] - elements))[:_NEIGHBOURS]
        return statistics.median(ms for _, ms in nearest) if len(nearest) >= _LEAST_NEIGHBOURS else None


def pairs(samples: Mapping[Work, Sequence[float]]) -> list[tuple[Work, float]]:
    """Samples with their work, of very many an even choice."""
    return _evenly([(work, ms) for work, of_work in samples.items() for ms in of_work], _MOST_OTHERS)


def _evenly(samples: list[_T], most: int) -> list[_T]:
    """So many of the samples at most, from all over."""
    return samples[:: -(-len(samples) // most)] if len(samples) > most else samples
