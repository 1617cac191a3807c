"""The Triton kernel of `TritonMaxPoolBackward`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    grad_output,
    offsets,
    grad,
    C,
    H,
    W,
    OH,
    OW,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    # One program: BLOCK_W pixels of one row of one image, BLOCK_C channels.
    row = tl.program_id(0)
    image = (row // H).to(tl.int64)
    h = row % H
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (w < W)[:, None] & (c < C)[None, :]
    total = tl.zeros((BLOCK_W, BLOCK_C), tl.float32)
    source = image * OH * OW * C
    # The windows that reach a pixel: along each axis the last one that begins before it, and those before that one.
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


def launch(
    grad_output: torch.Tensor,
    offsets: torch.Tensor,
    grad: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> None:
    """Write the gradient of a max pooling.

    Args:
        grad_output: ``[N, C, OH, OW]``, channels last.
        offsets: The place of each maximum in its window, int8, of the same shape and strides.
        grad: Where it goes: ``[N, C, H, W]``, channels last.
        kernel: The windows' height and width.
        stride: The steps between windows.
        padding: Rows above and columns before the image.
    """
    n, c, h, w = grad.shape
    oh, ow = grad_output.shape[2:]
    block_c = min(triton.next_power_of_2(c), 64)
    block_w = min(triton.next_power_of_2(w), 2048 // block_c)
    grid: Any = (n * h, triton.cdiv(w, block_w), triton.cdiv(c, block_c))
    with torch.cuda.device(grad.device):
        _kernel[grid](
            grad_output,
            offsets,
            grad,
            c,
            h,
            w,
            oh,
            ow,
            *kernel,
            *stride,
            *padding,
            BLOCK_W=block_w,
            BLOCK_C=block_c,
            num_warps=4,
        )
