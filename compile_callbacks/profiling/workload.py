"""What a step has to do, by which steps are compared with each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from compile_callbacks._utils.signatures import TensorLooks, signature


class Work(NamedTuple):
    """What a step has to do. Only steps of equal work are compared.

    Attributes:
        stage: Which stage, and which of its loaders.
        kind: All else but sizes: accumulation, structure and dtypes of the batch, which weights train.
        shapes: The shapes of the batch's tensors.
    """

    stage: str
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()

    def where(self, **conditions: object) -> Work:
        """The same under conditions that make a difference."""
        return self._replace(kind=_kind_where(self.kind, tuple(conditions.items())))

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Work:
        """Rebuild it from a list of its fields.

        Raises:
            TypeError: A field has a wrong type.
            ValueError: There are more or fewer fields.
        """
        stage, kind, sizes = data
        shapes = tuple(tuple(shape) for shape in sizes)
        if not (isinstance(stage, str) and isinstance(kind, str)):
            raise TypeError(f"stage={stage!r} and kind={kind!r} must be strings")
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise TypeError(f"shapes={sizes!r} must be lists of integers")
        return cls(stage, kind, shapes)


def baseline_from_data(data: Any) -> dict[Work, tuple[float, ...]]:
    """The samples by their work, from pairs of lists; nothing if the data has another form."""
    try:
        found = {Work.from_data(work): tuple(map(float, samples)) for work, samples in data}
    except (TypeError, ValueError, OverflowError):
        return {}
    return found if all(0 < sample < math.inf for samples in found.values() for sample in samples) else {}


def work_of(stage: str, batch: Any, part: str = "") -> Work:
    """What a step with a batch has to do.

    Args:
        stage: Which stage, and which of its loaders.
        batch: The batch.
        part: What else makes a difference.
    """
    return _work_of_looks(stage, part, signature(batch))


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
