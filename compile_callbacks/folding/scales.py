"""Moves per-channel arithmetic after a convolution or matrix product, such as a batch norm, into the weight."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from compile_callbacks import _torch

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SCALING = (_aten.mul.Tensor, _aten.div.Tensor)
_STEPS = (*_SCALING, _aten.add.Tensor, _aten.sub.Tensor)
_COMMUTATIVE = (_aten.mul.Tensor, _aten.add.Tensor)


class _Product(NamedTuple):
    """A convolution or matrix product. Dimension 1 of its result are the channels."""

    node: Node
    weight: Any
    bias: Any


class _Step(NamedTuple):
    """Arithmetic on the result of a product, with one operand for each channel, or a number."""

    node: Node
    operand: Any


def absorb_scales(graph: Graph, weight_only: set[Node], limit_bytes: int) -> None:
    """Rewrite ``(product(x, w) - mean) * a + b`` as ``product(x, w * a) + (b - mean * a)``.

    The new arithmetic on weights is done in the dtype of the old arithmetic (float32 for a batch norm under autocast),
    on weights that are not cast yet. The sum stays outside the product, where Inductor fuses it with the operators that
    follow, and where it is not rounded to the dtype of the weight.

    Args:
        graph: The graph, which is changed.
        weight_only: The nodes that depend only on weights, the weights included.
        limit_bytes: The memory that the scaled weights may take.
    """
    for node in list(graph.nodes):
        product = _as_product(node, weight_only)
        if product is None:
            continue
        steps = _steps_after(product, weight_only)
        size = product.weight.meta["val"].nbytes
        if size <= limit_bytes and any(step.node.target in _SCALING for step in steps):
            limit_bytes -= size
            _absorb(graph, product, steps)
    graph.eliminate_dead_code()
    graph.lint()


def _as_product(node: Node, weight_only: set[Node]) -> _Product | None:
    """A product of an input with a weight; ``None`` for other nodes."""
    if node.target is _aten.convolution.default and not node.args[6]:  # the weight of a transposed one differs
        product = _Product(node, *node.args[1:3])
    elif node.target is _aten.addmm.default and not node.kwargs:
        product = _Product(node, node.args[2], node.args[0])
    elif node.target is _aten.mm.default:
        product = _Product(node, node.args[1], None)
    else:
        return None
    has_bias = product.bias is not None
    if product.weight not in weight_only or (has_bias and product.bias not in weight_only):
        return None
    if has_bias and node.target is _aten.addmm.default and not _is_per_channel(product.bias, product, weight_only):
        return None  # a whole matrix is added
    return product


def _steps_after(product: _Product, weight_only: set[Node]) -> list[_Step]:
    """The arithmetic that is the only reader of the product, or of the step before it."""
    steps: list[_Step] = []
    node = product.node
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is _CAST and not steps and _is_wider(user, node):
            node = user
            continue
        if user.target not in _STEPS or user.kwargs or user.meta["val"].shape != product.node.meta["val"].shape:
            break
        left, right = user.args
        if left is not node and user.target in _COMMUTATIVE:
            left, right = right, left
        same_dtype = _dtype(user) == _dtype(node) or _is_wider(user, node)
        if left is not node or not same_dtype or not _is_per_channel(right, product, weight_only):
            break
        steps.append(_Step(user, right))
        node = user
    return steps


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_wider(node: Node, than: Node) -> bool:
    return _dtype(node).is_floating_point and _dtype(node).itemsize > _dtype(than).itemsize


def _is_per_channel(operand: Any, product: _Product, weight_only: set[Node]) -> bool:
    if isinstance(operand, (int, float)):
        return True
    if operand not in weight_only:
        return False
    value, result = operand.meta["val"], product.node.meta["val"]
    if not value.dtype.is_floating_point or value.dim() > result.dim():
        return False
    first = result.dim() - value.dim()
    return all(size == 1 or (d == 1 and size == result.shape[1]) for d, size in enumerate(value.shape, first))


def _absorb(graph: Graph, product: _Product, steps: list[_Step]) -> None:
    last, result = steps[-1].node, product.node.meta["val"]
    dtype, is_convolution = _dtype(last), product.node.target is _aten.convolution.default

    def call(target: Any, *arguments: Any, **kwargs: Any) -> Node:
        return _torch.graphs.add_node(graph, target, arguments, kwargs)

    def cast(node: Node, to: torch.dtype) -> Node:
        return node if _dtype(node) == to else call(_CAST, node, to)

    def number(value: float) -> Node:
        return call(_aten.full.default, [1] * (result.dim() - 1), value, dtype=dtype, device=result.device)

    def per_channel(operand: Any, dims: int = result.dim() - 1) -> Any:
        """The operand with ``dims`` dimensions, the first of them the channels."""
        return operand if not isinstance(operand, Node) else call(_aten.view.default, operand, [-1] + [1] * (dims - 1))

    def uncast(node: Node) -> Node:
        """The weight in the dtype of the arithmetic, before autocast has cast it if possible."""
        source = node.args[0] if node.target in (_CAST, _aten.permute.default) else None
        if node.target is _CAST and isinstance(source, Node) and _dtype(source) == dtype:
            return source
        if node.target is _aten.permute.default and isinstance(source, Node) and _dtype(node) != dtype:
            return call(_aten.permute.default, uncast(source), node.args[1])
        return cast(node, dtype)

    with graph.inserting_before(last):
        scale, shift = number(1.0), None if product.bias is None else per_channel(uncast(product.bias))
        for step in steps:
            operand = per_channel(step.operand)
            if step.node.target in _SCALING:
                scale = call(step.node.target, scale, operand)
                shift = shift and call(step.node.target, shift, operand)
            else:
                shift = call(step.node.target, shift or number(0.0), operand)
        # The channels are the first dimension of a convolution's weight, and the last of a matrix product's.
        factor = per_channel(scale, product.weight.meta["val"].dim() if is_convolution else 1)
        weight = cast(call(_aten.mul.Tensor, uncast(product.weight), factor), _dtype(product.weight))
        arguments = list(product.node.args)
        if is_convolution:
            scaled = call(_aten.convolution.default, arguments[0], weight, None, *arguments[3:])
        else:
            scaled = call(_aten.mm.default, arguments[0 if product.bias is None else 1], weight)
        scaled = cast(scaled, dtype)
        last.replace_all_uses_with(scaled if shift is None else call(_aten.add.Tensor, scaled, shift))
