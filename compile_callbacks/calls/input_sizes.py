"""`InputSizes`: the sizes of a target's inputs, which decide the dimensions that are dynamic in a new graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from compile_callbacks._utils.signatures import inputs_of

SPECIALIZED = (0, 1)
"""Sizes for which torch compiles a separate graph, even if the dimension is dynamic."""

MAX_SETS = 16
"""The maximum number of sets of sizes to keep. Two sizes already show that a dimension varies."""


class InputSizes:
    """The sizes of the inputs of a target in one phase.

    In the eager steps, a dimension varies if it has three sizes, or two sizes that each come in a quarter of the calls.
    The smaller last batch of an epoch does not make the batch size dynamic. Of later calls, those count that compile or
    that the code does not fit. If such calls have two sets of sizes, each set gets a static graph, because a dynamic
    graph is slower and would also serve the usual calls. With more sets, each dimension that has two sizes varies.

    An integer input counts as an input with one dimension. The sizes 0 and 1 of a tensor do not count.
    """

    def __init__(self) -> None:
        self._eager: dict[str, list[Counter[int]]] = {}  # the number of eager calls, by input, dimension and size
        self._sets: list[dict[str, tuple[int, ...]]] = []  # the sizes of calls that compile or that no code fits
        self._known: dict[str, set[int]] = {}  # the dimensions that varied in earlier runs

    def record_eager(self, args: Any, kwargs: Any) -> None:
        """Record an eager call of a step that does not compile. This takes about 1 µs per input."""
        for key, sizes in _sizes_of(args, kwargs).items():
            for count, size in zip(self._eager.setdefault(key, [Counter() for _ in sizes]), sizes, strict=True):
                count[size] += 1

    def record_compiled(self, args: Any, kwargs: Any) -> None:
        """Record a call that compiles, or that the compiled code does not fit."""
        sizes = _sizes_of(args, kwargs)
        if len(self._sets) < MAX_SETS and sizes not in self._sets:
            self._sets.append(sizes)

    def is_second_set(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call has the second set of sizes, for which a static graph is compiled."""
        return len(self._sets) == 2 and self._sets[1] == _sizes_of(args, kwargs)

    def varying(self) -> dict[str, list[int]]:
        """Return the dimensions that vary, by input. An integer that varies has the entry ``[0]``."""
        varying = {key: set(dimensions) for key, dimensions in self._known.items()}
        for key, counts in self._eager.items():
            varying.setdefault(key, set()).update(i for i, sizes in enumerate(counts) if _varies(key, sizes))
        later = self._sets if len(self._sets) > 2 else ()
        for key in {key for sizes in later for key in sizes}:
            by_dimension = zip(*(sizes[key] for sizes in later if key in sizes), strict=True)
            several = (i for i, sizes in enumerate(by_dimension) if len(_counted(key, sizes)) > 1)
            varying.setdefault(key, set()).update(several)
        return {key: sorted(dimensions) for key, dimensions in varying.items() if dimensions}

    def restore(self, key: object, dimensions: object) -> None:
        """Add the dimensions of an input that varied in an earlier run. Ignore values of another form."""
        rank = key.rpartition(":")[2] if isinstance(key, str) else ""
        count = 1 if rank == "int" else int(rank) if rank.isdecimal() and len(rank) < 3 else 0
        if isinstance(dimensions, list) and all(type(i) is int and 0 <= i < count for i in dimensions):
            self._known.setdefault(str(key), set()).update(dimensions)


def input_key(name: str, value: torch.Tensor | int) -> str:
    """Return an input's name with its number of dimensions, which separates tensors of different ranks."""
    return f"{name}:{value.dim()}" if isinstance(value, torch.Tensor) else f"{name}:int"


def _sizes_of(args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    return {
        input_key(name, value): tuple(value.shape) if isinstance(value, torch.Tensor) else (value,)
        for name, value in inputs_of(args, kwargs)
    }


def _counted(key: str, sizes: Iterable[int]) -> set[int]:
    return {size for size in sizes if key.endswith(":int") or size not in SPECIALIZED}


def _varies(key: str, counts: Counter[int]) -> bool:
    sizes = _counted(key, counts)
    return len(sizes) > 2 or sum(4 * counts[size] >= counts.total() for size in sizes) > 1
