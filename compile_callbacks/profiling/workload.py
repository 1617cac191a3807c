"""What a step has to do, by which steps are compared with each other."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from compile_callbacks._utils.signatures import TensorSignature, signature


class Workload(NamedTuple):
    """What a step has to do. Only steps of equal workload are compared.

    Attributes:
        stage: Which stage, and which of its loaders.
        kind: All else but sizes: accumulation, structure and dtypes of the batch, which weights train.
        shapes: The shapes of the batch's tensors.
    """

    stage: str
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()

    def with_conditions(self, **conditions: object) -> Workload:
        """The same under conditions that make a difference."""
        return self._replace(kind=_kind_where(self.kind, tuple(conditions.items())))

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Workload:
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


def baseline_from_data(data: Any) -> dict[Workload, tuple[float, ...]]:
    """The samples by workload, from pairs of lists; nothing if the data has another form."""
    try:
        found = {Workload.from_data(workload): tuple(map(float, samples)) for workload, samples in data}
    except (TypeError, ValueError, OverflowError):
        return {}
    return found if all(0 < sample < math.inf for samples in found.values() for sample in samples) else {}


def workload_of(stage: str, batch: Any, part: str = "") -> Workload:
    """What a step with a batch has to do.

    Args:
        stage: Which stage, and which of its loaders.
        batch: The batch.
        part: What else makes a difference.
    """
    return _workload_of_signature(stage, part, signature(batch))


@functools.lru_cache(maxsize=1024)  # in each step: small steps wait for the host
def _kind_where(kind: str, conditions: tuple[tuple[str, object], ...]) -> str:
    return ", ".join([kind, *(f"{name}={value}" for name, value in conditions)])


@functools.lru_cache(maxsize=1024)
def _workload_of_signature(stage: str, part: str, batch_signature: Any) -> Workload:
    shapes: list[tuple[int, ...]] = []
    kind = _without_sizes(batch_signature, shapes)
    return Workload(stage, f"{part}, {kind!r}" if part else repr(kind), tuple(shapes))


def _without_sizes(batch_signature: Any, shapes: list[tuple[int, ...]]) -> Any:
    """A signature without sizes, and of equal entries one; the shapes are appended."""
    if isinstance(batch_signature, TensorSignature):
        shapes.append(batch_signature.shape)
        return batch_signature._replace(shape=(0,) * len(batch_signature.shape))
    if not isinstance(batch_signature, tuple):
        return batch_signature
    found = [_without_sizes(entry, shapes) for entry in batch_signature]
    if all(isinstance(entry, type) for entry in batch_signature):  # no tensors: texts, for example
        shapes.append((len(batch_signature),))
    return tuple(dict.fromkeys(found))
