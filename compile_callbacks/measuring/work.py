"""What a step has to do: which steps are compared with each other, and when they have come to do something else."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from compile_callbacks.signatures import TensorLooks, signature

SIMILAR_SIZE = 1.5
"""Batches are of similar size where the larger has no more than so many times the elements of the smaller."""

STEPS_BETWEEN_LOOKS = 100
"""Steps after which it is asked whether most of them did other work; measuring eager ones anew takes a tenth."""


class Work(NamedTuple):
    """What a step has to do; steps of equal work are compared, and where hardly two are equal, steps of one kind.

    Attributes:
        stage: Which stage, and which of its loaders.
        kind: All else but sizes: accumulation, structure and dtypes of the batch, which weights train.
        shapes: The shapes of the batch's tensors.
    """

    stage: str
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def elements(self) -> int:
        """How large the batch is."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def of_any_size(self) -> Work:
        """The same with batches of whatever shapes."""
        return self._replace(shapes=())

    def where(self, **conditions: object) -> Work:
        """The same under conditions that make a difference."""
        named = ", ".join(f"{name}={value}" for name, value in conditions.items())
        return self._replace(kind=f"{self.kind}, {named}")

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Work:
        """What a list of the fields, as JSON would keep them, says."""
        stage, kind, shapes = data
        return cls(stage, kind, tuple(map(tuple, shapes)))


def work_of(stage: str, batch: Any, part: str = "") -> Work:
    """What a step with a batch has to do.

    Args:
        stage: Which stage, and which of its loaders.
        batch: The batch.
        part: What else makes a difference.
    """
    return _work_of_looks(stage, part, signature(batch))


def is_varied(samples: Counter[Any]) -> bool:
    """Whether steps of one kind have no usual work, so that few of them would be left to compare equal ones.

    Args:
        samples: How many there are of each work.
    """
    return 2 * max(samples.values(), default=0) < samples.total()


class KnownWork:
    """The work that eager steps of a phase were measured at, and whether others still do it.

    Args:
        gather: Gives what each process knows, in the same order in all of them.
    """

    def __init__(self, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> None:
        self._gather = gather
        self._by_kind: dict[str, Counter[Work]] = {}
        self._latest: list[Work] = []

    def __bool__(self) -> bool:
        return bool(self._by_kind)

    def add(self, work: Work) -> None:
        """An eager step was measured. Stages are not told apart: a test need not be measured where validation was."""
        self._by_kind.setdefault(work.kind, Counter())[work._replace(stage="")] += 1

    def has_changed(self, work: Work) -> bool:
        """A further step was taken: whether most of the latest ones, in all processes, did what was not measured.

        Where they did, theirs is the work that is known from here on.

        Args:
            work: What the step did.
        """
        if not self:
            return False
        self._latest.append(work)
        if len(self._latest) < STEPS_BETWEEN_LOOKS:
            return False
        latest, self._latest = self._latest, []
        of_ranks = self._gather(2 * sum(not self._covers(work) for work in latest) > len(latest))
        changed = bool(of_ranks) and all(of_ranks)
        if changed:
            self._by_kind.clear()
            for other in latest:
                self.add(other)
        return changed

    def _covers(self, work: Work) -> bool:
        of_kind = self._by_kind.get(work.kind)
        if of_kind is None:
            return False
        if work._replace(stage="") in of_kind or not work.shapes:
            return True
        sizes = [other.elements for other in of_kind] if is_varied(of_kind) else []
        return bool(sizes) and min(sizes) / SIMILAR_SIZE <= work.elements <= max(sizes) * SIMILAR_SIZE


@functools.lru_cache(maxsize=1024)
def _work_of_looks(stage: str, part: str, looks: Any) -> Work:
    shapes: list[tuple[int, ...]] = []
    kind = _without_sizes(looks, shapes)
    return Work(stage, f"{part}, {kind!r}" if part else repr(kind), tuple(shapes))


def _without_sizes(looks: Any, shapes: list[tuple[int, ...]]) -> Any:
    """A signature without sizes, and of equal entries in a row one; the shapes are appended."""
    if isinstance(looks, TensorLooks):
        shapes.append(looks.shape)
        return looks._replace(shape=(0,) * len(looks.shape))
    if not isinstance(looks, tuple):
        return looks
    found = [_without_sizes(entry, shapes) for entry in looks]
    return tuple(entry for number, entry in enumerate(found) if number == 0 or entry != found[number - 1])
