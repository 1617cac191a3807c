"""The graph passes that come with the library, and `define`, which defines their operators.

Triton is imported when a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("compile_callbacks", "FRAGMENT")


def define(schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``torch.ops.compile_callbacks.NAME``, and return the operator.

    The operator has no gradient, because passes run after autograd. On a GPU it is the function of this name in
    ``triton_kernels``, which writes to its last argument.

    Args:
        schema: The schema, ``"name(Tensor x) -> Tensor"``.
        reference: The operator in terms of torch's operators; used on a CPU.
        fake: Returns an uninitialized result with the right shape, dtype and strides.
    """
    name = schema.partition("(")[0]

    def cuda(*args: Any) -> Any:
        from compile_callbacks.passes.library import triton_kernels  # imports Triton

        out = fake(*args)
        getattr(triton_kernels, name)(*args, out)
        return out

    # The kernels rely on the strides that inputs have in the graph.
    _library.define(schema, tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag))
    _library.impl(name, reference, "CPU")
    _library.impl(name, cuda, "CUDA")
    # A meta kernel, because torch.library.register_fake searches all modules for its caller's source: 40 ms each.
    _library.impl(name, fake, "Meta")
    return getattr(torch.ops.compile_callbacks, name).default
