"""Counts compiled graphs and tensors in memory, and turns off automatic garbage collection."""

from __future__ import annotations

import contextlib
import gc

import torch
from torch._inductor.output_code import OutputCode


def compiled_graphs() -> int:
    """The number of graphs that Inductor compiled."""
    return sum(issubclass(type(value), OutputCode) for value in gc.get_objects())


def tensor_elements() -> int:
    """The number of elements of all tensors, except for torch's fake ones."""
    return sum(value.numel() for value in gc.get_objects() if type(value) in (torch.Tensor, torch.nn.Parameter))


@contextlib.contextmanager
def without_automatic_collection():
    """Python collects garbage only if torch or the library asks for it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
