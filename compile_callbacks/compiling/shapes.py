"""What a call's inputs look like, and what an input shape that was not seen before does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, get_args

import torch

NewShapes = Literal["recompile", "eager", "raise"]
"""What an unseen input shape does: compile anew, run eagerly, or end the run."""

NEW_SHAPES: tuple[NewShapes, ...] = get_args(NewShapes)

_CONTAINERS = (torch.Tensor, list, tuple, Mapping)

RETURNING_SHAPE_CALLS = 8
"""With ``"eager"``, a shape is compiled after all at its eighth call: it keeps coming back, and torch's default
``recompile_limit`` gives up after as many."""


def signature(args: Any, kwargs: Any = None) -> Any:
    """What a call's inputs look like: shapes, dtypes and devices of tensors, types of all else; hashable.

    Tensors are found in sequences, mappings (`transformers.BatchEncoding` is one), dataclasses and among the attributes
    of other objects (a batch of graphs).
    """
    if isinstance(args, torch.Tensor):
        return tuple(args.shape), args.dtype, args.device.type, args.requires_grad
    if isinstance(args, (list, tuple)):
        found = tuple(map(signature, args))
        return (found, signature(kwargs)) if kwargs else found
    if (entries := _entries(args)) is not None:
        return tuple((key, signature(value)) for key, value in entries)
    return type(args)


def shapes(value: Any) -> str:
    """The tensor shapes in a call's inputs, for messages."""
    if isinstance(value, torch.Tensor):
        return str(tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return ", ".join(shapes(item) for item in value)
    if (entries := _entries(value)) is not None:
        return ", ".join(f"{key}={shapes(item)}" for key, item in entries)
    return type(value).__name__


def _entries(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container, by name; ``None`` for what is none. Objects within objects are not looked into."""
    if isinstance(value, Mapping):
        return list(value.items())
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (type, torch.nn.Module)) or callable(value):
        return None
    found = [(name, held) for name, held in attributes.items() if isinstance(held, _CONTAINERS) or is_dataclass(held)]
    return found or None


class ShapePolicy:
    """Tells how a call may compile, by whether its inputs look like those of an earlier one.

    Args:
        new_shapes: What an unseen shape does.
    """

    def __init__(self, new_shapes: NewShapes) -> None:
        self._new_shapes = new_shapes
        self._known: set[Any] = set()
        self._calls: Counter[Any] = Counter()

    def admit(self, args: Any, kwargs: Any) -> None:
        """Have a call's shapes count as seen, so that they may compile."""
        self._known.add(signature(args, kwargs))

    def stance(self, args: Any, kwargs: Any) -> str | None:
        """Torch's stance for the call: ``None`` where it may compile.

        Under the stance a graph that fits the shape all the same, a dynamic one, is used.
        """
        if self._new_shapes == "recompile":
            return None
        looks = signature(args, kwargs)
        if looks in self._known:
            return None
        self._calls[looks] += 1
        returning = self._new_shapes == "eager" and self._calls[looks] >= RETURNING_SHAPE_CALLS
        if not self._known or returning:
            self._known.add(looks)
            return None
        return "eager_on_recompile" if self._new_shapes == "eager" else "fail_on_recompile"
