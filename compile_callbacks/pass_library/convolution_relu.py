"""Inference only: bias, residual and ReLU in the convolution's own kernel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_callbacks.pass_library.devices import check_devices
from compile_callbacks.pass_library.operators import define, is_channels_last
from compile_callbacks.passes import GraphPass, call_before, find_nodes

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_HALF = (torch.float16, torch.bfloat16)
_CHANNELS = 8  # cuDNN's fused kernels for tensor cores read 16 bytes of channels at a time


class CudnnConvolutionReLU(GraphPass):
    """Puts what follows a convolution, up to its ReLU, into cuDNN's kernel for the convolution.

    Inductor computes bias, residual and ReLU in a kernel after the convolution, which reads and writes every
    activation once more. cuDNN's fused kernels do it before the result leaves the chip. In inference, with
    ``C`` output channels::

        conv: bfloat16[N, C, H, W] = aten.convolution.default(x, weight, None, ...)
        wide: float32[N, C, H, W] = prims.convert_element_type.default(conv, float32)
        moved: float32[N, C, H, W] = aten.add.Tensor(wide, bias)        # bias: float32[1, C, 1, 1]
        narrow: bfloat16[N, C, H, W] = prims.convert_element_type.default(moved, bfloat16)
        sum: bfloat16[N, C, H, W] = aten.add.Tensor(narrow, residual)   # where there is one
        relu: bfloat16[N, C, H, W] = aten.relu.default(sum)

    becomes::

        relu: bfloat16[N, C, H, W] = compile_callbacks.convolution_relu.default(x, weight, bias, residual, ...)

    The batch norms of a residual network have this form once their scales are in the weights: with weight folding,
    which is on in the infer phase, or frozen.

    Training is left alone: its backward needs what lies between. Numerics change: one rounding to the half type in
    place of up to three, so that results lie nearer to those of float32.

    It takes convolutions of float16 or bfloat16, channels last, ungrouped, of 8, 16, 24, ... input and output channels;
    others stay as they are, a network's first one among them: for 3 input channels cuDNN has no such kernel.

    Args:
        devices: Device types on which it acts. On a CPU the operator is its reference, which is slower than what
            Inductor makes, and is there for tests.

    Raises:
        TypeError: ``devices`` is no list of strings.
        ValueError: An unknown device type, or none.

    Example::

        >>> CudnnConvolutionReLU().name
        'CudnnConvolutionReLU'
    """

    def __init__(self, devices: Sequence[str] = ("cuda",)) -> None:
        self.devices = check_devices(devices)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Fuse each convolution that a ReLU follows."""
        if not is_inference:
            return
        for relu in find_nodes(graph, _aten.relu.default):
            if (match := _match(relu.args[0])) is not None and self._takes(match, relu):
                _fuse(match, relu)
        graph.eliminate_dead_code()

    def _takes(self, match: _Match, relu: Node) -> bool:
        _, _, _, stride, padding, dilation, transposed, _, groups = match.convolution.args
        x, weight = (match.convolution.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]
        out = relu.meta["val"]
        residual = None if match.residual is None else match.residual.meta["val"]
        return bool(
            x.device.type in self.devices
            and x.dtype in _HALF
            and x.dtype == weight.dtype == out.dtype
            and not transposed
            and groups == 1
            and all(channels % _CHANNELS == 0 for channels in weight.shape[:2])
            and all(len(value) == 2 for value in (stride, padding, dilation))  # type: ignore[arg-type]
            and is_channels_last(x)
            and (residual is None or (is_channels_last(residual) and residual.shape == out.shape))
            and (residual is None or residual.dtype == out.dtype)
        )


@dataclass
class _Match:
    """A convolution, and what is added to its result: a value a channel, and an image."""

    convolution: Node
    bias: Node | None = None
    residual: Node | None = None


def _match(node: Any) -> _Match | None:
    """The convolution that a value comes from by way of additions, which nothing else reads between."""
    if not isinstance(node, Node) or len(node.users) != 1:
        return None
    if node.target is _CAST and _is_float(node) and _is_float(node.args[0]):
        return _match(node.args[0])
    if node.target is _aten.convolution.default:
        return _Match(node, bias=node.args[2])  # type: ignore[arg-type]
    if node.target is not _aten.add.Tensor or node.kwargs or not all(isinstance(arg, Node) for arg in node.args):
        return None
    for value, added in (node.args, reversed(node.args)):
        if (match := _match(value)) is None:
            continue
        if _is_per_channel(added, node) and match.bias is None:
            match.bias = added  # type: ignore[assignment]
            return match
        if match.residual is None and not _is_per_channel(added, node):
            match.residual = added  # type: ignore[assignment]
            return match
    return None


def _is_float(node: Any) -> bool:
    return isinstance(node, Node) and node.meta["val"].dtype.is_floating_point


def _is_per_channel(node: Any, of: Node) -> bool:
    shape, channels = tuple(node.meta["val"].shape), of.meta["val"].shape[1]
    return shape in ((1, channels, 1, 1), (channels, 1, 1))


def _fuse(match: _Match, relu: Node) -> None:
    x, weight, _, stride, padding, dilation, _, _, groups = match.convolution.args
    bias = match.bias
    if bias is not None and bias.meta["val"].dim() != 1:
        bias = call_before(relu, _aten.reshape.default, bias, [bias.meta["val"].numel()])
    fused = call_before(relu, convolution_relu, x, weight, bias, match.residual, stride, padding, dilation, groups)
    relu.replace_all_uses_with(fused)


# ------------------------------------------------------------------------------------------ the operator


def _reference(
    x: Any, weight: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Any:
    out = _aten.convolution.default(x, weight, None, stride, padding, dilation, False, [0, 0], groups).float()
    if bias is not None:
        out = out + bias.float()[:, None, None]
    if residual is not None:
        out = out + residual.float()
    return out.relu().to(x.dtype).contiguous(memory_format=torch.channels_last)


def _cudnn(x: Any, weight: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    weight = weight.contiguous(memory_format=torch.channels_last)
    try:
        if residual is None:
            return _aten.cudnn_convolution_relu.default(x, weight, bias, stride, padding, dilation, groups)
        return _aten.cudnn_convolution_add_relu.default(
            x, weight, residual, 1.0, bias, stride, padding, dilation, groups
        )
    except RuntimeError as error:  # no kernel of this cuDNN for these shapes on this GPU
        warnings.warn(f"cuDNN fuses no ReLU into {tuple(weight.shape)}: {error}", stacklevel=2)
        out = _aten.convolution.default(x, weight, bias, stride, padding, dilation, False, [0, 0], groups)
        return (out if residual is None else out.add_(residual)).relu_()


def _fake(x: Any, weight: Any, bias: Any, residual: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
    out = _aten.convolution.default(x, weight, None, stride, padding, dilation, False, [0, 0], groups)
    return torch.empty_like(out, memory_format=torch.channels_last)


convolution_relu = define(
    "convolution_relu(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt groups) -> Tensor",
    reference=_reference,
    cuda=_cudnn,
    fake=_fake,
)
