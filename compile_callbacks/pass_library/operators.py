"""Operators of our own, which passes put into graphs: one definition for CPU, GPU and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("compile_callbacks", "FRAGMENT")


def define(schema: str, *, reference: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.compile_callbacks.NAME``; it has no gradient, and is for graphs behind autograd.

    Args:
        schema: Its schema, ``"name(Tensor x) -> Tensor"``.
        reference: What it computes, of torch's own operators; what runs on a CPU.
        cuda: The same on a GPU.
        fake: The result without its values: shape, dtype, strides.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    # Inputs come with the strides that the graph has for them, as kernels count on them.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, reference, "CPU")
    _library.impl(name, cuda, "CUDA")
    # As a meta kernel: torch.library.register_fake looks for its own caller's source in all modules, 40 ms for each.
    _library.impl(name, fake, "Meta")
    return getattr(torch.ops.compile_callbacks, name).default


def is_channels_last(value: Any) -> bool:
    """Whether a graph's value is an image batch, ``[N, C, H, W]``, dense and channels last."""
    return (
        isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )
