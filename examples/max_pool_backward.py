"""Compute the gradient of max pooling in a Triton kernel that reads less memory than Inductor's code.

A graph pass finds the pooling in Inductor's backward graph, and replaces it by a custom operator. The script compares
the gradients with eager. On a GPU, the script also times ResNet's first layers with and without the pass. The kernel
needs a GPU. On a CPU, the operator runs its reference, and the script shows the change of the graph.

    python examples/max_pool_backward.py
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import inductor_prims
from torch.fx import Graph, Node

from compile_callbacks import GraphPass, compile_phases, restore
from compile_callbacks.passes import RecordGraphs, call_before, find_nodes

aten = torch.ops.aten
offsets_to_indices: Any = inductor_prims._low_memory_max_pool_offsets_to_indices
COPIES_AND_CASTS = (aten.clone.default, aten.reshape.default, torch.ops.prims.convert_element_type.default)

# ------------------------------------------------------------------------------------------ the operator


# needs_exact_strides, because the kernel relies on the strides that inputs have in the graph.
@torch.library.custom_op(
    "examples::max_pool2d_backward", mutates_args=(), device_types="cpu", tags=(torch.Tag.needs_exact_strides,)
)
def max_pool2d_backward(
    grad_output: Tensor, offsets: Tensor, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:  # fmt: skip
    """Compute the gradient of a max pooling on a CPU. The operator has no gradient, because passes run after autograd.

    Shapes: ``grad_output`` and ``offsets`` [N, C, OH, OW], ``size`` and the result [N, C, H, W], all channels last.
    ``offsets`` (int8) contain the position of each maximum in its window.
    """
    indices = offsets_to_indices(offsets, kernel, size, stride, padding, [1, 1])
    grad = grad_output.new_zeros((*grad_output.shape[:2], size[0] * size[1]), dtype=torch.float32)
    grad.scatter_add_(2, indices.flatten(2), grad_output.float().flatten(2))
    grad = grad.reshape(*grad_output.shape[:2], *size).to(grad_output.dtype)
    return grad.contiguous(memory_format=torch.channels_last)


@max_pool2d_backward.register_fake
def empty_gradient(grad_output, offsets, size, kernel, stride, padding):
    dtype, device, shape = grad_output.dtype, grad_output.device, (*grad_output.shape[:2], *size)
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


if torch.cuda.is_available():  # not every torch for CPUs comes with Triton
    import triton
    import triton.language as tl

    @triton.jit
    def max_pool2d_backward_kernel(
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
        # Along each axis, the windows that contain a pixel are the last window that begins before it and earlier ones.
        for i in tl.static_range((KH + SH - 1) // SH):
            oh = (h + PH) // SH - i
            kh = h + PH - oh * SH
            if (oh >= 0) & (oh < OH) & (kh < KH):
                for j in tl.static_range((KW + SW - 1) // SW):
                    ow = (w + PW) // SW - j
                    kw = w + PW - ow * SW
                    reached = inside & ((ow >= 0) & (ow < OW) & (kw < KW))[:, None]
                    at = (oh * OW + ow)[:, None] * C + c[None, :]
                    offset = tl.load(offsets + source + at, mask=reached, other=-1).to(tl.int32)
                    chosen = reached & (offset == (kh * KW + kw)[:, None])
                    total += tl.load(grad_output + source + at, mask=chosen, other=0.0).to(tl.float32)
        at = (h * W + w)[:, None] * C + c[None, :]
        tl.store(grad + image * H * W * C + at, total.to(grad.dtype.element_ty), mask=inside)

    @max_pool2d_backward.register_kernel("cuda")
    def on_gpu(grad_output, offsets, size, kernel, stride, padding):
        grad = empty_gradient(grad_output, offsets, size, kernel, stride, padding)
        n, c, h, w = grad.shape
        block_c = min(triton.next_power_of_2(c), 64)
        block_w = min(triton.next_power_of_2(w), 2048 // block_c)
        sizes = (c, h, w, *grad_output.shape[2:], *kernel, *stride, *padding)
        with torch.cuda.device(grad.device):
            max_pool2d_backward_kernel[n * h, triton.cdiv(w, block_w), triton.cdiv(c, block_c)](
                grad_output, offsets, grad, *sizes, BLOCK_W=block_w, BLOCK_C=block_c, num_warps=4
            )
        return grad


# ------------------------------------------------------------------------------------------ the pass


class TritonMaxPoolBackward(GraphPass):
    """Computes the gradient of ``max_pool2d`` in a Triton kernel.

    Inductor saves the position of each window's maximum as an 8-bit offset. In backward, Inductor converts the offsets
    to 64-bit indices and compares each index with each position. The Triton kernel compares the offsets, and reads a
    gradient only if its offset matches. In the backward graph of training, with windows of 3 x 3::

        offsets: int8[N, C, H/2, W/2] = input
        indices: int64[N, C, H/2, W/2] = prims._low_memory_max_pool_offsets_to_indices.default(offsets, [3, 3], ...)
        grad: bfloat16[N, C, H, W] = aten.max_pool2d_with_indices_backward.default(grad_output, x, ..., indices)

    or, in torch 2.15, an ``aten.scatter_add`` into zeros, becomes::

        grad: bfloat16[N, C, H, W] = examples.max_pool2d_backward.default(grad_output, offsets, ...)

    The kernel adds the gradients of overlapping windows in float32 and rounds once, as Inductor's code does, but in
    another order. The pass replaces two-dimensional poolings in channels last, without dilation, on one type of device.
    """

    def __init__(self, device_type: str = "cuda") -> None:
        self.device_type = device_type

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        for indices in () if is_inference else find_nodes(graph, offsets_to_indices):
            arguments: Any = indices.args
            offsets, kernel, size, stride, padding, dilation = arguments
            if any(step != 1 for step in dilation):
                continue
            pooling = from_one_operator(indices) or from_scatter_add(indices)
            if pooling is not None and self.supports(*pooling, offsets):
                gradient, grad_output = pooling
                args = (grad_output, offsets, size, kernel, stride, padding)
                operator = torch.ops.examples.max_pool2d_backward.default
                gradient.replace_all_uses_with(call_before(gradient, operator, *args))
        graph.eliminate_dead_code()

    def supports(self, gradient: Node, grad_output: Node, offsets: Node) -> bool:
        value = grad_output.meta["val"]
        return (
            value.device.type == self.device_type
            and is_channels_last(value)
            and is_channels_last(offsets.meta["val"])
            and gradient.meta["val"].dtype == value.dtype
        )


def from_one_operator(indices: Any) -> tuple[Any, Any] | None:
    """The gradients of input and output, if one operator computes the gradient, as in torch 2.11."""
    for user in indices.users:
        if user.target is aten.max_pool2d_with_indices_backward.default:
            return user, user.args[0]
    return None


def from_scatter_add(indices: Any) -> tuple[Any, Any] | None:
    """The gradients of input and output, if torch scatters into zeros [N * C, H * W], as in torch 2.15."""
    *_, places = readers(indices)
    scatter = next(iter(places.users))
    if scatter.target is not aten.scatter_add.default or scatter.args[2] is not places:
        return None
    zeros, dim, _, source = scatter.args
    if zeros.args[1] != 0 or dim != 1:
        return None
    shape, size = indices.meta["val"].shape, indices.args[2]
    for grad_output in sources(source):
        if grad_output.meta["val"].shape == shape and is_channels_last(grad_output.meta["val"]):
            for gradient in readers(scatter):
                value = gradient.meta["val"]
                if value.shape == (*shape[:2], *size) and value.dtype == grad_output.meta["val"].dtype:
                    return gradient, grad_output
    return None


def readers(node: Any) -> Iterator[Any]:
    """A node, and the copies and casts that follow it while each node has a single user."""
    yield node
    while len(node.users) == 1 and (reader := next(iter(node.users))).target in COPIES_AND_CASTS:
        yield (node := reader)


def sources(node: Any) -> Iterator[Any]:
    """A node, and the nodes before it while each node is a copy or a cast of the node before."""
    yield node
    while node.target in COPIES_AND_CASTS:
        yield (node := node.args[0])


def is_channels_last(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------ the effect


def step_ms(net: nn.Module, x: Tensor, *passes: GraphPass) -> float:
    """The milliseconds of a forward and a backward pass that are compiled with the passes."""
    compile_phases(net, passes=passes, verify="off")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(x).float().sum()
        loss.backward()

    milliseconds = triton.testing.do_bench(step, grad_to_none=[x], return_mode="median")
    restore(net)
    return milliseconds


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first_layers = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    net = nn.Sequential(first_layers, nn.MaxPool2d(3, 2, 1)).to(device)
    net = net.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 32, 32, device=device).to(memory_format=torch.channels_last).requires_grad_()

    # The pass must replace the operator in the backward graph, and the gradients must be close to those of eager.
    (expected,) = torch.autograd.grad(net(x).sum(), x)
    before, after = RecordGraphs(), RecordGraphs()
    compile_phases(net, passes=[before, TritonMaxPoolBackward(device), after], on_error="raise", verify="off")
    (actual,) = torch.autograd.grad(net(x).sum(), x)
    restore(net)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)  # convolutions on a GPU round to TF32
    (old,), (new,) = ([g.ops for g in record.graphs if g.kind == "backward"] for record in (before, after))
    assert new["examples.max_pool2d_backward.default"] == 1
    for name in sorted(name for name in old | new if old[name] != new[name]):
        print(f"{name}: {old[name]} before the pass, {new[name]} after it")
    if device == "cpu":
        print("The kernel needs a GPU. On this CPU, the operator ran its reference.")
        return

    x = torch.randn(128, 3, 224, 224, device=device).to(memory_format=torch.channels_last).requires_grad_()
    without = step_ms(net, x)
    print(f"a step takes {without:.3f} ms without the pass, {step_ms(net, x, TritonMaxPoolBackward()):.3f} ms with it")


if __name__ == "__main__":
    main()
