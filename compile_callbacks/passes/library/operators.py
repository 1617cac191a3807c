"""Custom operators of the Triton passes, with one definition for CPU, GPU and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("compile_callbacks", "FRAGMENT")


def define(schema: str, *, reference: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.compile_callbacks.NAME``. It has no gradient, because passes run after autograd.

    Args:
        schema: The schema, ``"name(Tensor x) -> Tensor"``.
        reference: The operator in terms of torch's operators; used on a CPU.
        cuda: The operator on a GPU.
        fake: The operator on fake tensors: shape, dtype and strides of the result.

    Returns:
        The operator.
    """
    name = schema.partition("(")[0]
    # The kernels rely on the strides that inputs have in the graph.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, reference, "CPU")
    _library.impl(name, cuda, "CUDA")
    # A meta kernel, because torch.library.register_fake searches all modules for its caller's source: 40 ms each.
    _library.impl(name, fake, "Meta")
    return getattr(torch.ops.compile_callbacks, name).default


def is_channels_last(value: Any) -> bool:
    """Whether a graph's value is an image batch, ``[N, C, H, W]``, dense and channels last."""
    return (
        isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )
