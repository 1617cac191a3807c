"""Inputs that a module is compiled on: checked, kept in host memory, and written down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.backend.plain_data import as_plain
from compile_callbacks.links import checks_settings

Sample = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments and keyword arguments of one call."""


@checks_settings
def as_samples(samples: object) -> list[Sample]:
    """The samples, their tensors copied to host memory: what a module does to its inputs does not reach them.

    Args:
        samples: A list of pairs ``(args, kwargs)``.

    Raises:
        TypeError: It is no list, or one of its items is no such pair.
        ValueError: It is empty, or an item has another number of parts than two.
    """
    if not isinstance(samples, Sequence) or isinstance(samples, str):
        raise TypeError(f"samples must be a list of pairs (args, kwargs), not {type(samples).__name__}")
    if not samples:
        raise ValueError("samples is empty; a module is compiled on at least one pair (args, kwargs)")
    return [_as_sample(index, sample) for index, sample in enumerate(samples)]


def on_device(sample: Sample, device: torch.device) -> Sample:
    """A copy of a sample on a device."""
    args, kwargs = _torch.tree_map_tensors(lambda tensor: tensor.to(device, copy=True), sample)
    return args, kwargs


def written_down(samples: Sequence[Sample]) -> list[Any]:
    """The samples as lists, dicts, plain values and tensors.

    Raises:
        ValueError: A sample holds something else.
    """
    return [
        [as_plain(list(args), f"samples[{index}] args"), as_plain(kwargs, f"samples[{index}] kwargs")]
        for index, (args, kwargs) in enumerate(samples)
    ]


def _as_sample(index: int, sample: object) -> Sample:
    where = f"samples[{index}]"
    if not isinstance(sample, (tuple, list)):
        raise TypeError(
            f"{where} must be a pair (args, kwargs), not {type(sample).__name__}: ((x,), {{}}) for a call f(x)"
        )
    if len(sample) != 2:
        raise ValueError(f"{where} must be a pair (args, kwargs), and has {len(sample)} parts")
    args, kwargs = sample
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{where} must begin with a tuple of positional arguments, not {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"{where} must end with a mapping of keyword arguments, not {type(kwargs).__name__}")
    for name in kwargs:
        if not isinstance(name, str):
            raise TypeError(f"{where} has the keyword argument {name!r}, which is no string")
    args, kwargs = _torch.tree_map_tensors(_on_host, (tuple(args), dict(kwargs)))
    return args, kwargs


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor that is made in inference mode is another kind of input to a compiler
        return tensor.detach().to("cpu", copy=True)
