"""`Workload`: the stage, batch shapes and conditions of a step. `StepTimer` compares only steps of equal workload."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from compile_callbacks._utils.signatures import TensorSignature


class Workload(NamedTuple):
    """The conditions of a step. Two steps can be compared if their workloads are equal.

    ``kind`` contains gradient accumulation, the structure and dtypes of the batch, and the set of trained weights.
    """

    stage: str  # the stage and the number of its dataloader
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def from_data(cls, data: Sequence[Any]) -> Workload:
        """Create a workload from a list of its fields."""
        stage, kind, sizes = data
        shapes = tuple(tuple(shape) for shape in sizes)
        if not (isinstance(stage, str) and isinstance(kind, str)):
            raise TypeError(f"stage={stage!r} and kind={kind!r} must be strings")
        if not all(isinstance(size, int) for shape in shapes for size in shape):
            raise TypeError(f"shapes={sizes!r} must be lists of integers")
        return cls(stage, kind, shapes)


@functools.lru_cache(maxsize=1024)  # because each timed step calls this, and small steps are CPU-bound
def workload_of(stage: str, conditions: str, batch_signature: Any) -> Workload:
    """Return the workload of a step from the signature of its batch."""
    shapes: list[tuple[int, ...]] = []
    kind = _without_sizes(batch_signature, shapes)
    return Workload(stage, f"{conditions}, {kind!r}" if conditions else repr(kind), tuple(shapes))


def _without_sizes(batch_signature: Any, shapes: list[tuple[int, ...]]) -> Any:
    """Return a signature without sizes and repeated entries, and append the sizes to ``shapes``."""
    if isinstance(batch_signature, TensorSignature):
        shapes.append(batch_signature.shape)
        return batch_signature._replace(shape=(0,) * len(batch_signature.shape))
    if not isinstance(batch_signature, tuple):
        return batch_signature
    without_sizes = [_without_sizes(entry, shapes) for entry in batch_signature]
    if all(isinstance(entry, type) for entry in batch_signature):  # no tensors, for example a list of strings
        shapes.append((len(batch_signature),))
    return tuple(dict.fromkeys(without_sizes))
