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


_MOST_CHANGES = 5
_RETURNING_STEPS = 5  # of a hundred


class Work(NamedTuple):
    """What a step has to do; steps of equal work are compared, and where hardly two are equal, steps of one kind.

    Attributes:
        stage: Which stage, and which of its loaders.
        kind: All else but sizes: accumulation, structure and dtypes of the batch, which weights train.
        shapes: The shapes of the batch's tensors.
        new: Whether no step before it that ran in the same way had these shapes. Libraries choose kernels for each,
            which may take longer than the step (attention on a GPU does).
    """

    stage: str
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    new: bool = False

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
        return self._replace(kind=_kind_where(self.kind, tuple(conditions.items())))

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Work:
        """What a list of the fields, as JSON would keep them, says."""
        stage, kind, shapes, new = data
        return cls(stage, kind, tuple(map(tuple, shapes)), new)


def baseline_from_data(data: Any) -> dict[Work, tuple[float, ...]]:
    """Samples by their work, of pairs of lists; nothing where an earlier version wrote something else."""
    try:
        return {Work.from_data(work): tuple(map(float, samples)) for work, samples in data}
    except (TypeError, ValueError):
        return {}


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
    """The work that steps of a phase were measured at, and whether others still do it.

    After each change twice as many steps are looked at, and after a few none: batches that change again and again are
    not to be measured again and again.

    Args:
        gather: Gives what each process knows, in the same order in all of them.
    """

    def __init__(self, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> None:
        self._gather = gather
        self._by_kind: dict[str, Counter[Work]] = {}
        self._latest: Counter[Work] = Counter()
        self._looked_at = 0  # steps since it was last asked; of several processes, of the one that took the fewest
        self._window: Counter[Work] = Counter()
        self._changes = 0

    def __bool__(self) -> bool:
        return bool(self._by_kind)

    def add(self, work: Work, times: int = 1) -> None:
        """A step was measured. Stages are not told apart: a test need not be measured where validation was."""
        self._by_kind.setdefault(work.kind, Counter())[work._replace(stage="")] += times

    def has_changed(self, work: Work) -> bool:
        """A further step was taken: whether most of the latest ones, in all processes, did what was not measured.

        Where something comes of it, `accept_change` is to follow.

        Args:
            work: What the step did.
        """
        if not self or self._changes >= _MOST_CHANGES:
            return False
        self._latest[work._replace(stage="")] += 1
        self._looked_at += 1
        if self._looked_at < STEPS_BETWEEN_LOOKS * 2**self._changes:
            return False
        latest, self._latest, self._looked_at = self._latest, Counter(), 0
        self._window = latest
        other = Counter(dict.fromkeys(latest, 0))
        for kind in {work.kind for work in latest}:
            covers = self._covering(kind)
            for one in latest:
                if one.kind == kind and not covers(one):
                    other[one] = latest[one]
        # Of kinds that return: with batches of ever other structure nothing would be compared all the same.
        kinds: Counter[str] = Counter()
        for one, times in other.items():
            kinds[one.kind] += times
        returning = sum(times for times in kinds.values() if times >= _RETURNING_STEPS)
        of_ranks = self._gather(2 * returning > latest.total())
        return bool(of_ranks) and all(of_ranks)

    def accept_change(self) -> None:
        """What the latest steps did is measured from here on, and what was measured before is forgotten."""
        self._changes += 1
        self._by_kind.clear()
        for work, times in self._window.items():
            self.add(work, times)

    def stage_ends(self) -> None:
        """A stage ends, of which processes may take unequally many steps: they look at the same ones from here on."""
        if of_ranks := self._gather(self._looked_at):
            self._looked_at = min(of_ranks)

    def _covering(self, kind: str) -> Callable[[Work], bool]:
        """What tells whether work of a kind is comparable with what was measured of it."""
        of_kind = self._by_kind.get(kind)
        if of_kind is None:
            return lambda work: False
        sizes = [other.elements for other in of_kind] if is_varied(of_kind) else [0]
        least, most = min(sizes) / SIMILAR_SIZE, max(sizes) * SIMILAR_SIZE
        return lambda work: not work.shapes or work in of_kind or least <= work.elements <= most


@functools.lru_cache(maxsize=1024)  # in each step: small steps wait for the host
def _kind_where(kind: str, conditions: tuple[tuple[str, object], ...]) -> str:
    return ", ".join([kind, *(f"{name}={value}" for name, value in conditions)])


@functools.lru_cache(maxsize=1024)
def _work_of_looks(stage: str, part: str, looks: Any) -> Work:
    shapes: list[tuple[int, ...]] = []
    kind = _without_sizes(looks, shapes)
    return Work(stage, f"{part}, {kind!r}" if part else repr(kind), tuple(shapes))


def _without_sizes(looks: Any, shapes: list[tuple[int, ...]]) -> Any:
    """A signature without sizes, and of equal entries one; the shapes are appended."""
    if isinstance(looks, TensorLooks):
        shapes.append(looks.shape)
        return looks._replace(shape=(0,) * len(looks.shape))
    if not isinstance(looks, tuple):
        return looks
    found = [_without_sizes(entry, shapes) for entry in looks]
    if all(isinstance(entry, type) for entry in looks):  # no tensors: texts, for example
        shapes.append((len(looks),))
    return tuple(dict.fromkeys(found))
