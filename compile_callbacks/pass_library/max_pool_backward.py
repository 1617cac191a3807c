"""Training only: the gradient of a max pooling by a kernel that reads as little as it can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_callbacks import _torch
from compile_callbacks.pass_library.devices import check_devices
from compile_callbacks.pass_library.operators import define, is_channels_last
from compile_callbacks.passes import GraphPass, call_before, find_nodes

_aten = torch.ops.aten


class TritonMaxPoolBackward(GraphPass):
    """Computes the gradient of ``max_pool2d`` with a Triton kernel of its own.

    Inductor writes the windows' positions as 8-bit offsets, and in backward makes 64-bit indices of them again and
    compares each with each position. The kernel compares the offsets themselves, and reads a gradient only where
    they match. In the backward graph of training, with windows of 3 x 3::

        offsets: int8[N, C, H/2, W/2] = input
        indices: int64[N, C, H/2, W/2] = prims._low_memory_max_pool_offsets_to_indices.default(offsets, [3, 3], ...)
        grad: bfloat16[N, C, H, W] = aten.max_pool2d_with_indices_backward.default(grad_output, x, ..., indices)

    becomes::

        grad: bfloat16[N, C, H, W] = compile_callbacks.max_pool2d_backward.default(grad_output, offsets, ...)

    Inference has no backward graph, and is left alone. Numerics: gradients of windows that overlap are added in float32
    and rounded once, as Inductor does it, in another order.

    It takes poolings in two dimensions, channels last, without dilation; others stay as they are.

    Args:
        devices: Device types on which it acts. On a CPU the operator is its reference, which is slower than what
            Inductor makes, and is there for tests.

    Raises:
        TypeError: ``devices`` is no list of strings.
        ValueError: An unknown device type, or none.

    Example::

        >>> TritonMaxPoolBackward().hook
        'post_grad_post'
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.devices = check_devices(devices)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Replace each gradient of a max pooling."""
        if is_inference:
            return
        for node in find_nodes(graph, _aten.max_pool2d_with_indices_backward.default):
            grad_output, x, kernel, stride, padding, dilation, _, indices = node.args
            if self._takes(grad_output, x, dilation, indices):
                offsets = indices.args[0]  # type: ignore[union-attr]
                size = x.meta["val"].shape[2:]  # type: ignore[union-attr]
                new = call_before(
                    node, max_pool2d_backward, grad_output, offsets, list(size), kernel, stride or kernel, padding
                )
                node.replace_all_uses_with(new)
        graph.eliminate_dead_code()

    def _takes(self, grad_output: Any, x: Any, dilation: Any, indices: Any) -> bool:
        return (
            isinstance(indices, Node)
            and indices.target is _torch.pool_offsets_to_indices()
            and grad_output.meta["val"].device.type in self.devices
            and is_channels_last(grad_output.meta["val"])
            and is_channels_last(indices.args[0].meta["val"])  # type: ignore[union-attr]
            and x.meta["val"].dtype == grad_output.meta["val"].dtype
            and all(step == 1 for step in (dilation if isinstance(dilation, (list, tuple)) else [dilation]))
        )


# ------------------------------------------------------------------------------------------ the operator


def _reference(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    indices = _torch.pool_offsets_to_indices()(offsets, kernel, size, stride, padding, [1, 1])
    grad = grad_output.new_zeros((*grad_output.shape[:2], size[0] * size[1]), dtype=torch.float32)
    grad.scatter_add_(2, indices.flatten(2), grad_output.float().flatten(2))
    grad = grad.reshape(*grad_output.shape[:2], *size).to(grad_output.dtype)
    return grad.contiguous(memory_format=torch.channels_last)


def _triton(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    from compile_callbacks.pass_library.max_pool_backward_kernel import launch

    grad = _fake(grad_output, offsets, size, kernel, stride, padding)
    launch(grad_output, offsets, grad, kernel, stride, padding)
    return grad


def _fake(grad_output: Any, offsets: Any, size: Any, kernel: Any, stride: Any, padding: Any) -> Any:
    return torch.empty(
        (*grad_output.shape[:2], *size),
        dtype=grad_output.dtype,
        device=grad_output.device,
        memory_format=torch.channels_last,
    )


max_pool2d_backward = define(
    "max_pool2d_backward(Tensor grad_output, Tensor offsets, SymInt[] size, SymInt[] kernel, SymInt[] stride, "
    "SymInt[] padding) -> Tensor",
    reference=_reference,
    cuda=_triton,
    fake=_fake,
)
