"""What inputs and batches look like: shapes, dtypes and devices of the tensors in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch

_CONTAINERS = (torch.Tensor, list, tuple, Mapping)


class TensorLooks(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool


def signature(args: Any, kwargs: Any = None) -> Any:
    """What a call's inputs look like: shapes, dtypes and devices of tensors, types of all else; hashable.

    Tensors are found in sequences, mappings (`transformers.BatchEncoding` is one), dataclasses and among the attributes
    of other objects (a batch of graphs).
    """
    if isinstance(args, torch.Tensor):
        return TensorLooks(tuple(args.shape), args.dtype, args.device.type, args.requires_grad)
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
