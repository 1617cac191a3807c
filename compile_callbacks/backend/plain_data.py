"""Data that ``torch.load(weights_only=True)`` gives back: plain containers, plain values and tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def as_plain(value: Any, where: str) -> Any:
    """A value with its containers copied and its tensors on the CPU, without autograd; there they share their memory.

    Args:
        value: Nested lists, tuples and dicts of numbers, strings, booleans, ``None`` and tensors.
        where: What a message calls it.

    Raises:
        ValueError: Something in it is of another type, a subclass of these among them.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (torch.Tensor, nn.Parameter):
        return value.detach().cpu()
    if kind in (list, tuple):
        return kind(as_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is dict:
        return {_key(key, where): as_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    raise ValueError(f"{where} is of type {kind.__name__}, which cannot be written down as plain data and tensors")


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{where} has the key {key!r} of type {type(key).__name__}, where plain data has a string")
    return key
