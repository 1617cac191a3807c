"""The library's own graph pass, and `define`, which defines its operator.

The first launch of a kernel imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("compile_callbacks", "FRAGMENT")


def define(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.compile_callbacks.NAME``, and return the operator.

    The operator has no gradient, because passes run after autograd. On a GPU, the operator calls the function of the
    same name in ``triton_kernels``, which writes to its last argument. On a CPU, it calls ``reference``. ``fake``
    returns an uninitialized result with the right shape, dtype and strides.
    """
    name = schema.partition("(")[0]

    def cuda(*args: Any) -> Any:
        from compile_callbacks.passes.library import triton_kernels  # imported here, because it imports Triton

        out = fake(*args)
        getattr(triton_kernels, name)(*args, out)
        return out

    # needs_exact_strides, because the kernels rely on the strides that inputs have in the graph.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, reference, "CPU")
    _library.impl(name, cuda, "CUDA")
    # A meta kernel, because torch.library.register_fake takes 40 ms to search all modules for its caller's source.
    _library.impl(name, fake, "Meta")
    return getattr(torch.ops.compile_callbacks, name).default
