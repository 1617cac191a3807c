"""Moves what follows a convolution or matrix product channel by channel, as a batch norm does, into its weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from compile_callbacks import _torch

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default

# Where the weight stands among the arguments of a product.
_PRODUCTS = {_aten.convolution.default: 1, _aten.addmm.default: 2, _aten.mm.default: 1}
_STEPS = (_aten.mul.Tensor, _aten.div.Tensor, _aten.add.Tensor, _aten.sub.Tensor)
_SCALING = (_aten.mul.Tensor, _aten.div.Tensor)

Operand = Node | float
"""What a step has beside the product: a tensor of one value a channel, or a number."""


def absorb_scales(graph: Graph, depends_on_weights: Callable[[], set[Node]], fits: Callable[[Node], bool]) -> None:
    """Rewrite ``(product(x, w) - mean) * a * b + c`` as ``product(x, w * (a * b)) + (c - mean * a * b)``.

    The arithmetic on weights is done in the type that the steps compute in (float32 for a batch norm under autocast),
    from weights as they are before they are cast. What is added stays outside the product: there it is fused with
    what follows, at no cost, and is not rounded to the weight's type.

    Args:
        graph: The graph, which is changed.
        depends_on_weights: Gives the nodes that depend on weights alone, placeholders among them.
        fits: Whether a weight may be kept a second time.
    """
    weight_only = depends_on_weights()
    for product in list(graph.nodes):
        if product.target not in _PRODUCTS or _weight_of(product) not in weight_only:
            continue
        steps = _steps(product, weight_only)
        if any(step.target in _SCALING for step, _ in steps) and fits(_weight_of(product)):
            _absorb(graph, product, steps)
    graph.eliminate_dead_code()
    graph.lint()


def _weight_of(product: Node) -> Node:
    weight: Node = product.args[_PRODUCTS[product.target]]  # type: ignore[index, assignment]
    return weight


def _bias_of(product: Node) -> Any:
    if product.target is _aten.convolution.default:
        return product.args[2]
    return product.args[0] if product.target is _aten.addmm.default else None


def _steps(product: Node, weight_only: set[Node]) -> list[tuple[Node, Operand]]:
    """The steps that a product goes through, and nothing else reads it between, each with its operand."""
    bias = _bias_of(product)
    if bias is not None and bias not in weight_only:
        return []
    if product.target is _aten.convolution.default and product.args[6]:
        return []  # transposed: channels lie elsewhere in its weight
    if product.target is _aten.addmm.default and (product.kwargs or not _is_per_channel(bias, product, weight_only)):
        return []  # with factors, or with more than a bias
    steps: list[tuple[Node, Operand]] = []
    node = product
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is _CAST and not steps and _is_wider(user, node):
            node = user
            continue
        if user.target not in _STEPS or user.kwargs or not (_is_wider(user, node) or _dtype(user) == _dtype(node)):
            break
        left, right = user.args[:2]
        if left is node:
            operand = right
        elif user.target in (_aten.mul.Tensor, _aten.add.Tensor):
            operand = left
        else:
            break
        if operand is node or not _is_per_channel(operand, product, weight_only):
            break
        if user.meta["val"].shape != product.meta["val"].shape:
            break
        steps.append((user, operand))  # type: ignore[arg-type]
        node = user
    return steps


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_wider(node: Node, than: Node) -> bool:
    return _dtype(node).is_floating_point and _dtype(node).itemsize > _dtype(than).itemsize


def _is_per_channel(operand: Any, product: Node, weight_only: set[Node]) -> bool:
    if isinstance(operand, (int, float)):
        return True
    if operand not in weight_only:
        return False
    value, result = operand.meta["val"], product.meta["val"]
    if not value.dtype.is_floating_point or value.dim() > result.dim():
        return False
    channel = value.dim() - _dims_from_channel(product)
    return all(size == 1 or (d == channel and size == _channels(product)) for d, size in enumerate(value.shape))


def _dims_from_channel(product: Node) -> int:
    """How many of a product's dimensions there are from that of its channels on."""
    return product.meta["val"].dim() - 1 if product.target is _aten.convolution.default else 1


def _channels(product: Node) -> int:
    channels: int = product.meta["val"].shape[-_dims_from_channel(product)]
    return channels


def _absorb(graph: Graph, product: Node, steps: Sequence[tuple[Node, Operand]]) -> None:
    last, weight, bias = steps[-1][0], _weight_of(product), _bias_of(product)
    dtype = _dtype(last)
    with graph.inserting_before(last):
        arithmetic = _Arithmetic(graph, dtype)
        scale: Operand = 1.0
        shift: Operand = 0.0
        if isinstance(bias, Node):
            shift = arithmetic.spread(arithmetic.uncast(bias), _channels(product), _dims_from_channel(product))
        for step, operand in steps:
            shift = arithmetic.apply(step.target, shift, operand)
            if step.target in _SCALING:
                scale = arithmetic.apply(step.target, scale, operand)
        # Channels come first in a convolution's weight and last in that of a matrix product.
        dims = weight.meta["val"].dim() if product.target is _aten.convolution.default else 1
        scaled = arithmetic.apply(
            _aten.mul.Tensor, arithmetic.uncast(weight), arithmetic.spread(scale, _channels(product), dims)
        )
        arguments = list(product.args)
        if product.target is _aten.convolution.default:
            target, arguments[1:3] = product.target, [arithmetic.cast(scaled, _dtype(weight)), None]
        else:
            inputs = product.args[1] if product.target is _aten.addmm.default else product.args[0]
            target, arguments = _aten.mm.default, [inputs, arithmetic.cast(scaled, _dtype(weight))]
        result = arithmetic.cast(arithmetic.call(target, *arguments), dtype)
        result = arithmetic.apply(_aten.add.Tensor, result, shift)
    last.replace_all_uses_with(result)


class _Arithmetic:
    """Adds nodes to a graph, and computes with numbers where there are no tensors.

    Args:
        graph: The graph.
        dtype: The type to compute in.
    """

    def __init__(self, graph: Graph, dtype: torch.dtype) -> None:
        self._graph = graph
        self._dtype = dtype

    def call(self, target: Any, *arguments: Any) -> Node:
        return _torch.graphs.add_node(self._graph, target, arguments)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if _dtype(node) == dtype else self.call(_CAST, node, dtype)

    def apply(self, target: Any, left: Operand, right: Operand) -> Any:
        """A step on two operands; nothing is added to the graph for ``x + 0`` and ``x * 1``."""
        if not isinstance(left, Node) and not isinstance(right, Node):
            return _ON_NUMBERS[target](left, right)
        if not isinstance(right, Node) and right == (1 if target in _SCALING else 0):
            return left
        if isinstance(left, Node):
            return self.call(target, left, right)
        inverse = _INVERSES.get(target)
        return self.apply(
            _OF_INVERSE.get(target, target), right if inverse is None else self.call(inverse, right), left
        )

    def spread(self, operand: Operand, channels: int, dims: int) -> Operand:
        """An operand with ``dims`` dimensions, the first of them the channels."""
        if not isinstance(operand, Node):
            return operand
        value = operand.meta["val"]
        shape = [channels if value.numel() == channels else 1] + [1] * (dims - 1)
        return operand if list(value.shape) == shape else self.call(_aten.view.default, operand, shape)

    def uncast(self, node: Node) -> Node:
        """A weight in the type to compute in: as it was before it was cast, where it was."""
        source = node.args[0] if node.target in (_CAST, _aten.permute.default) else None
        if node.target is _CAST and isinstance(source, Node) and _dtype(source) == self._dtype:
            return source
        if node.target is _aten.permute.default and isinstance(source, Node) and _dtype(node) != self._dtype:
            return self.call(_aten.permute.default, self.uncast(source), node.args[1])
        return self.cast(node, self._dtype)


# A number minus, or divided by, a tensor.
_INVERSES = {_aten.sub.Tensor: _aten.neg.default, _aten.div.Tensor: _aten.reciprocal.default}
_OF_INVERSE = {_aten.sub.Tensor: _aten.add.Tensor, _aten.div.Tensor: _aten.mul.Tensor}
_ON_NUMBERS: dict[Any, Callable[[Any, Any], Any]] = {
    _aten.mul.Tensor: lambda left, right: left * right,
    _aten.div.Tensor: lambda left, right: left / right,
    _aten.add.Tensor: lambda left, right: left + right,
    _aten.sub.Tensor: lambda left, right: left - right,
}
