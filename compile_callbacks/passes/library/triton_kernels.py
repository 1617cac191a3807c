"""The Triton kernels of the passes in this folder. The first call of an operator on a GPU imports this module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _max_pool2d_backward_kernel(
    grad_output, offsets, grad, C, H, W, OH, OW,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # One program computes BLOCK_W pixels and BLOCK_C channels of one row of one image.
    row = tl.program_id(0)
    image = (row // H).to(tl.int64)
    h = row % H
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (w < W)[:, None] & (c < C)[None, :]
    total = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    source = image * OH * OW * C
    # Along each axis, the windows that contain a pixel are the last window that begins before it and earlier windows.
    for i in tl.static_range((KH + SH - 1) // SH):
        oh = (h + PH) // SH - i
        kh = h + PH - oh * SH
        if (oh >= 0) & (oh < OH) & (kh < KH):
            for j in tl.static_range((KW + SW - 1) // SW):
                ow = (w + PW) // SW - j
                kw = w + PW - ow * SW
                reached = inside & ((ow >= 0) & (ow < OW) & (kw < KW))[:, None]
                at = (oh * OW + ow)[:, None] * C + c[None, :]
                chosen = tl.load(offsets + source + at, mask=reached, other=-1).to(tl.int32) == (kh * KW + kw)[:, None]
                total += tl.load(grad_output + source + at, mask=reached & chosen, other=0.0).to(tl.float32)
    at = (h * W + w)[:, None] * C + c[None, :]
    tl.store(grad + image * H * W * C + at, total.to(grad.dtype.element_ty), mask=inside)


def max_pool2d_backward(
    grad_output: torch.Tensor, offsets: torch.Tensor, size: Sequence[int], kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], grad: torch.Tensor,
) -> None:  # fmt: skip
    """Compute the gradient of a max pooling.

    Shapes: ``grad_output`` and ``offsets`` [N, C, OH, OW], ``grad`` [N, C, H, W], all channels last. ``offsets`` (int8)
    contain the position of each maximum in its window.
    """
    n, c, h, w = grad.shape
    oh, ow = grad_output.shape[2:]
    block_c = min(triton.next_power_of_2(c), 64)
    block_w = min(triton.next_power_of_2(w), 2048 // block_c)
    grid: Any = (n * h, triton.cdiv(w, block_w), triton.cdiv(c, block_c))
    sizes = (c, h, w, oh, ow, *kernel, *stride, *padding)
    with torch.cuda.device(grad.device):
        _max_pool2d_backward_kernel[grid](
            grad_output, offsets, grad, *sizes, BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4
        )
