"""`TritonMaxPoolBackward`: replaces the gradient of max pooling in training by a kernel that reads less memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from compile_callbacks import _torch
from compile_callbacks.passes.base import GraphPass
from compile_callbacks.passes.rewriting import call_before, find_nodes

_aten = torch.ops.aten
_COPIES_AND_CASTS = (_aten.clone.default, _aten.reshape.default, torch.ops.prims.convert_element_type.default)


class TritonMaxPoolBackward(GraphPass):
    """Computes the gradient of ``max_pool2d`` in a Triton kernel.

    Inductor saves the position of each window's maximum as an 8-bit offset. In backward, Inductor converts the offsets
    to 64-bit indices and compares each index with each position. The Triton kernel compares the offsets, and reads a
    gradient only if its offset matches. In the backward graph of training, with windows of 3 x 3::

        offsets: int8[N, C, H/2, W/2] = input
        indices: int64[N, C, H/2, W/2] = prims._low_memory_max_pool_offsets_to_indices.default(offsets, [3, 3], ...)
        grad: bfloat16[N, C, H, W] = aten.max_pool2d_with_indices_backward.default(grad_output, x, ..., indices)

    or, in torch 2.15, an ``aten.scatter_add`` into zeros, becomes::

        grad: bfloat16[N, C, H, W] = compile_callbacks.max_pool2d_backward.default(grad_output, offsets, ...)

    The kernel adds the gradients of overlapping windows in float32 and rounds once, as Inductor's code does, but in
    another order.

    The pass replaces two-dimensional poolings in channels last, without dilation. It does not change inference graphs.

    Attributes:
        devices: Device types on which the pass acts. Tests add ``"cpu"``. On a CPU, the operator runs its reference.

    Example::

        >>> TritonMaxPoolBackward().hook
        'post_grad_post'
    """

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Replace each gradient of a max pooling."""
        if is_inference:
            return
        for indices in find_nodes(graph, _torch.inductor.pool_offsets_to_indices()):
            offsets, kernel, size, stride, padding, dilation = indices.args
            if any(step != 1 for step in dilation):  # type: ignore[union-attr]
                continue
            pooling = _from_one_operator(indices) or _from_scatter_add(indices)
            if pooling is not None and self._supports(*pooling, offsets):
                gradient, grad_output = pooling
                args = (grad_output, offsets, size, kernel, stride, padding)
                gradient.replace_all_uses_with(call_before(gradient, max_pool2d_backward, *args))
        graph.eliminate_dead_code()

    def _supports(self, gradient: Node, grad_output: Node, offsets: Any) -> bool:
        value = grad_output.meta["val"]
        return (
            value.device.type in self.devices
            and _is_channels_last(value)
            and _is_channels_last(offsets.meta["val"])
            and gradient.meta["val"].dtype == value.dtype
        )


def _from_one_operator(indices: Node) -> tuple[Node, Node] | None:
    """Return the gradients of input and output, if one operator computes the gradient, as in torch 2.11."""
    for user in indices.users:
        if user.target is _aten.max_pool2d_with_indices_backward.default:
            return user, user.args[0]  # type: ignore[return-value]
    return None


def _from_scatter_add(indices: Node) -> tuple[Node, Node] | None:
    """Return the gradients of input and output, if torch scatters into zeros [N * C, H * W], as in torch 2.15."""
    *_, places = _readers(indices)
    scatter = next(iter(places.users))
    if scatter.target is not _aten.scatter_add.default or scatter.args[2] is not places:
        return None
    zeros, dim, _, source = scatter.args
    if zeros.args[1] != 0 or dim != 1:  # type: ignore[union-attr]
        return None
    shape, size = indices.meta["val"].shape, indices.args[2]
    for grad_output in _sources(source):
        if grad_output.meta["val"].shape == shape and _is_channels_last(grad_output.meta["val"]):
            for gradient in _readers(scatter):
                value = gradient.meta["val"]
                if value.shape == (*shape[:2], *size) and value.dtype == grad_output.meta["val"].dtype:  # type: ignore[misc]
                    return gradient, grad_output
    return None


def _readers(node: Node) -> Iterator[Node]:
    """Yield a node, and the copies and casts that follow it while each node has a single user."""
    yield node
    while len(node.users) == 1 and (reader := next(iter(node.users))).target in _COPIES_AND_CASTS:
        yield (node := reader)


def _sources(node: Any) -> Iterator[Node]:
    """Yield a node, and the nodes before it while each node is a copy or a cast of the node before."""
    yield node
    while node.target in _COPIES_AND_CASTS:
        yield (node := node.args[0])


def _is_channels_last(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    )


def _reference(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    indices = _torch.inductor.pool_offsets_to_indices()(offsets, kernel, size, stride, padding, [1, 1])
    grad = grad_output.new_zeros((*grad_output.shape[:2], size[0] * size[1]), dtype=torch.float32)
    grad.scatter_add_(2, indices.flatten(2), grad_output.float().flatten(2))
    grad = grad.reshape(*grad_output.shape[:2], *size).to(grad_output.dtype)
    return grad.contiguous(memory_format=torch.channels_last)


def _fake(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    dtype, device, shape = grad_output.dtype, grad_output.device, (*grad_output.shape[:2], *size)
    return torch.empty(shape, dtype=dtype, device=device, memory_format=torch.channels_last)


def _on_gpu(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    from compile_callbacks.passes.library import triton_kernels  # imported here, because it imports Triton

    grad = _fake(grad_output, offsets, size, kernel, stride, padding)
    triton_kernels.max_pool2d_backward(grad_output, offsets, size, kernel, stride, padding, grad)
    return grad


_library = torch.library.Library("compile_callbacks", "FRAGMENT")
_library.define(
    "max_pool2d_backward(Tensor grad_output, Tensor offsets, SymInt[] size, SymInt[] kernel, SymInt[] stride, "
    "SymInt[] padding) -> Tensor",
    # needs_exact_strides, because the kernel relies on the strides that inputs have in the graph.
    tags=(torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag),
)
# A meta kernel, because torch.library.register_fake takes 40 ms to search all modules for its caller's source.
for _function, _key in ((_reference, "CPU"), (_on_gpu, "CUDA"), (_fake, "Meta")):
    _library.impl("max_pool2d_backward", _function, _key)

max_pool2d_backward: Any = torch.ops.compile_callbacks.max_pool2d_backward.default
"""The operator. It has no gradient, because passes run after autograd."""
