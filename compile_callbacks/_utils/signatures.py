"""Describes batches and inputs of calls by the shapes, dtypes and devices of their tensors, in bounded time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import islice
from typing import Any

import torch

_CONTAINERS = (torch.Tensor, list, tuple, Mapping)
_MAX_VALUES = 32  # a value takes about 1 µs, and each timed step needs the signature of its batch
_MAX_INPUTS = 1000
_MAX_DEPTH = 8


def signature(inputs: Any) -> Any:
    """Return a hashable description of a batch: shape, dtype, device and ``requires_grad`` of tensors, other types."""
    return _signature_of(inputs, [_MAX_VALUES], _MAX_DEPTH)  # ends also if a batch contains itself


def _signature_of(value: Any, left: list[int], depth: int) -> Any:
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.device.type, value.requires_grad
    if not depth or left[0] <= 0 or (entries := _entries(value)) is None:
        return type(value)
    is_list, signatures = isinstance(value, (list, tuple)), []
    for key, item in entries:  # without a generator, because each timed step needs the signature of its batch
        if left[0] <= 0:
            break
        of_item = _signature_of(item, left, depth - 1)
        signatures.append(of_item if is_list else (key, of_item))
    return (*signatures, len(value)) if is_list and len(signatures) < len(value) else tuple(signatures)


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a call's inputs that are no weights, each with a name such as ``kwargs['state']['h']``."""
    left = [_MAX_INPUTS]
    for name, inputs in (("args", args), ("kwargs", kwargs)):
        for key, value in _entries(inputs) or ():
            yield from _tensors(f"{name}[{key!r}]", value, left, _MAX_DEPTH)


def _tensors(name: str, value: Any, left: list[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    left[0] -= 1
    if isinstance(value, torch.Tensor):
        if not isinstance(value, torch.nn.Parameter):
            yield name, value
    elif depth and left[0] > 0:
        for key, item in _entries(value) or ():
            if left[0] <= 0:
                return
            yield from _tensors(f"{name}[{key!r}]", item, left, depth - 1)


def _entries(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return the entries of a container by name, or ``None`` for any other value. Omit objects within objects."""
    # Mappings such as `transformers.BatchEncoding`, dataclasses, and objects such as a batch of graphs.
    if isinstance(value, (list, tuple)):
        return enumerate(value)
    if isinstance(value, Mapping):
        return value.items()
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict) or isinstance(value, (type, torch.nn.Module)) or callable(value):
        return None
    first = islice(attributes.items(), _MAX_VALUES)
    containers = [(name, held) for name, held in first if isinstance(held, _CONTAINERS) or is_dataclass(held)]
    return containers or None
