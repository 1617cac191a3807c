"""`TritonSqueezeExcitation`: fuses both layers of a squeeze-and-excitation block into one kernel in inference."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from compile_callbacks.passes.base import GraphPass
from compile_callbacks.passes.library import define
from compile_callbacks.passes.rewriting import call_before, find_nodes

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default

MAX_HIDDEN = 128
"""The most hidden channels that fit into the registers of one kernel program. Published networks have 4 to 128."""


class TritonSqueezeExcitation(GraphPass):
    """Computes both layers of a squeeze-and-excitation block (Hu et al., 2018) in one Triton kernel.

    After the squeeze, an image has one value per channel, so the two convolutions are matrix-vector products. These
    products are so small that launching a kernel takes longer than its arithmetic. In inference, with ``C`` channels,
    ``R`` hidden channels, and ReLU or SiLU as ``act``::

        hidden: bfloat16[N, R, 1, 1] = aten.convolution.default(squeezed, weight_1, bias_1, ...)
        active: bfloat16[N, R, 1, 1] = act(hidden)                      # one operator or several
        out: bfloat16[N, C, 1, 1] = aten.convolution.default(active, weight_2, bias_2, ...)

    becomes::

        out: bfloat16[N, C, 1, 1] = compile_callbacks.two_layers.default(squeezed, weight_1, bias_1, weight_2, ...)

    The kernel keeps values between the layers in float32.

    The pass replaces blocks of up to `MAX_HIDDEN` hidden channels. It does not change training graphs.

    Attributes:
        devices: Device types on which the pass acts. Tests add ``"cpu"``. On a CPU, the operator runs its reference.

    Example::

        >>> TritonSqueezeExcitation().name
        'TritonSqueezeExcitation'
    """

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Fuse the two layers of each block."""
        if not is_inference:
            return
        for second in find_nodes(graph, _aten.convolution.default):
            if not _is_matrix_times_vector(second) or second.meta["val"].device.type not in self.devices:
                continue
            first, activation = _activation(second.args[0]) or (None, "")
            if first is None or not _is_matrix_times_vector(first):
                continue
            hidden = first.meta["val"]
            if hidden.dtype == second.meta["val"].dtype and hidden.shape[1] <= MAX_HIDDEN:
                new = call_before(second, two_layers, *first.args[:3], *second.args[1:3], activation)
                second.replace_all_uses_with(new)
        graph.eliminate_dead_code()


def _is_matrix_times_vector(node: Any) -> bool:
    """Return whether a node is a convolution of images of one pixel, with a bias."""
    if not isinstance(node, Node) or node.target is not _aten.convolution.default:
        return False
    x, weight, bias, _, padding, _, transposed, _, groups = node.args
    return bool(
        isinstance(bias, Node)
        and not transposed
        and groups == 1
        and tuple(weight.meta["val"].shape[2:]) == (1, 1)  # type: ignore[union-attr]
        and tuple(x.meta["val"].shape[2:]) == (1, 1)  # type: ignore[union-attr]
        and not any(padding)  # type: ignore[arg-type]
    )


def _activation(value: Any) -> tuple[Node, str] | None:
    """Return the convolution and the activation that compute a value, if no other node reads a result between them."""
    last, value = value, _uncast(value)
    if not isinstance(value, Node):
        return None
    if value.target is _aten.relu.default:
        source, activation = value.args[0], "relu"
    elif value.target is _aten.div.Tensor and _is_one_plus_exp_of_minus(value.args[1], value.args[0]):
        source, activation = value.args[0], "silu"
    elif value.target is _aten.mul.Tensor and (x := _x_of_x_times_sigmoid(value)) is not None:
        source, activation = x, "silu"
    else:
        return None
    first = _uncast(source)
    if not isinstance(first, Node) or first.target is not _aten.convolution.default:
        return None
    return (first, activation) if _is_only_path(first, last) else None


def _is_only_path(first: Node, last: Node) -> bool:
    """Return whether one node reads ``last``, and no other node reads ``first`` or a node between them."""
    inside, open_ = {last}, [last]
    while open_:
        for source in open_.pop().all_input_nodes:
            if source is not first and source not in inside:
                inside.add(source)
                open_.append(source)
    readers = {user for node in (first, *inside) if node is not last for user in node.users}
    return readers <= inside and len(last.users) == 1


def _uncast(value: Any) -> Any:
    return value.args[0] if isinstance(value, Node) and value.target is _CAST else value


def _is_one_plus_exp_of_minus(value: Any, x: Any) -> bool:
    """Return whether a value is ``1 + exp(-x)``."""
    for target, other in ((_aten.add.Tensor, 1), (_aten.exp.default, None), (_aten.neg.default, None)):
        if not isinstance(value, Node) or value.target is not target or (other is not None and value.args[1] != other):
            return False
        value = value.args[0]
    return value is x


def _x_of_x_times_sigmoid(value: Node) -> Any:
    for x, gate in (value.args, reversed(value.args)):
        if isinstance(gate, Node) and gate.target is _aten.sigmoid.default and gate.args[0] is x:
            return x
    return None


def _reference(x: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, activation: str) -> Any:
    hidden = x.float().flatten(1) @ weight_1.float().flatten(1).t() + bias_1.float()
    active = torch.nn.functional.silu(hidden) if activation == "silu" else hidden.relu()
    out = active @ weight_2.float().flatten(1).t() + bias_2.float()
    return out.to(x.dtype)[:, :, None, None].contiguous(memory_format=torch.channels_last)


def _fake(x: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, activation: str) -> Any:
    shape = (x.shape[0], weight_2.shape[0], 1, 1)
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


two_layers = define(
    "two_layers(Tensor x, Tensor weight_1, Tensor bias_1, Tensor weight_2, Tensor bias_2, str activation) -> Tensor",
    reference=_reference,
    fake=_fake,
)
