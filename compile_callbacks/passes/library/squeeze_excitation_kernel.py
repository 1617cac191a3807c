"""The Triton kernel of `TritonSqueezeExcitation`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(
    x,
    weight_1,
    bias_1,
    weight_2,
    bias_2,
    out,
    C_IN: tl.constexpr,
    HIDDEN: tl.constexpr,
    C_OUT: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program: one image, both layers. The hidden values never leave it.
    image = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BLOCK_HIDDEN)
    total = tl.zeros((BLOCK_HIDDEN,), tl.float32)
    for start in tl.static_range(0, C_IN, BLOCK):
        c = start + tl.arange(0, BLOCK)
        value = tl.load(x + image * C_IN + c, mask=c < C_IN, other=0.0).to(tl.float32)
        mask = (r < HIDDEN)[:, None] & (c < C_IN)[None, :]
        weight = tl.load(weight_1 + r[:, None] * C_IN + c[None, :], mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(weight * value[None, :], axis=1)
    hidden = total + tl.load(bias_1 + r, mask=r < HIDDEN, other=0.0).to(tl.float32)
    hidden = hidden * tl.sigmoid(hidden) if SILU else tl.maximum(hidden, 0.0)
    for start in tl.static_range(0, C_OUT, BLOCK):
        c = start + tl.arange(0, BLOCK)
        mask = (c < C_OUT)[:, None] & (r < HIDDEN)[None, :]
        weight = tl.load(weight_2 + c[:, None] * HIDDEN + r[None, :], mask=mask, other=0.0).to(tl.float32)
        value = tl.sum(weight * hidden[None, :], axis=1)
        value += tl.load(bias_2 + c, mask=c < C_OUT, other=0.0).to(tl.float32)
        tl.store(out + image * C_OUT + c, value.to(out.dtype.element_ty), mask=c < C_OUT)


def launch(
    x: torch.Tensor,
    weight_1: torch.Tensor,
    bias_1: torch.Tensor,
    weight_2: torch.Tensor,
    bias_2: torch.Tensor,
    out: torch.Tensor,
    activation: str,
) -> None:
    """Compute two layers on images of one pixel.

    Args:
        x: ``[N, C_IN, 1, 1]``.
        weight_1: ``[HIDDEN, C_IN, 1, 1]``.
        bias_1: ``[HIDDEN]``.
        weight_2: ``[C_OUT, HIDDEN, 1, 1]``.
        bias_2: ``[C_OUT]``.
        out: Where the result goes: ``[N, C_OUT, 1, 1]``, dense.
        activation: ``"relu"`` or ``"silu"``, between the layers.
    """
    hidden, c_in = weight_1.shape[:2]
    c_out = weight_2.shape[0]
    block_hidden = triton.next_power_of_2(hidden)
    block = min(triton.next_power_of_2(max(c_in, c_out)), 32768 // block_hidden, 1024)
    with torch.cuda.device(x.device):
        _kernel[(x.shape[0],)](
            x.flatten(1).contiguous(),
            weight_1.flatten(1).contiguous(),
            bias_1,
            weight_2.flatten(1).contiguous(),
            bias_2,
            out,
            C_IN=c_in,
            HIDDEN=hidden,
            C_OUT=c_out,
            SILU=activation == "silu",
            BLOCK_HIDDEN=block_hidden,
            BLOCK=block,
            num_warps=8,
        )
