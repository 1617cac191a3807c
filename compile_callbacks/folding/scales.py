"""Moves per-channel arithmetic after a convolution, such as a batch norm, into the convolution's weight."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from compile_callbacks import _torch

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SCALING = (_aten.mul.Tensor, _aten.div.Tensor)
_STEPS = (*_SCALING, _aten.add.Tensor, _aten.sub.Tensor)
_COMMUTATIVE = (_aten.mul.Tensor, _aten.add.Tensor)


def absorb_scales(graph: Graph, weight_only: set[Node], limit_bytes: int) -> None:
    """Rewrite ``(conv(x, w) - mean) * a + b`` as ``conv(x, w * a) + (b - mean * a)``.

    The new arithmetic uses the dtype of the old arithmetic (float32 for a batch norm under autocast). The sum remains
    outside the convolution, so that it is not rounded to the dtype of the weight. Inductor fuses it with later
    operators. Batch norms rarely follow matrix products directly, so these remain.

    ``weight_only`` contains the weights, and the nodes that depend only on weights. The scaled weights take at most
    ``limit_bytes``.
    """
    for conv in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        _, weight, bias, *_, transposed, _, _ = conv.args
        if transposed or weight not in weight_only or (bias is not None and bias not in weight_only):
            continue  # the weight of a transposed convolution has another layout
        steps = _steps_after(conv, weight_only)
        size = weight.meta["val"].nbytes
        if size <= limit_bytes and any(step.target in _SCALING for step, _ in steps):
            limit_bytes -= size
            _absorb(graph, conv, steps)
    graph.eliminate_dead_code()
    graph.lint()


def _steps_after(conv: Node, weight_only: set[Node]) -> list[tuple[Node, Any]]:
    """Return the chain of arithmetic nodes after a convolution, each with its operand, if nothing else reads them."""
    steps: list[tuple[Node, Any]] = []
    node = conv
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target is _CAST and not steps and _is_wider(user, node):
            node = user
            continue
        if user.target not in _STEPS or user.kwargs or user.meta["val"].shape != conv.meta["val"].shape:
            break
        left, right = user.args
        if left is not node and user.target in _COMMUTATIVE:
            left, right = right, left
        same_dtype = _dtype(user) == _dtype(node) or _is_wider(user, node)
        if left is not node or not same_dtype or not _is_per_channel(right, conv, weight_only):
            break
        steps.append((user, right))
        node = user
    return steps


def _dtype(node: Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _is_wider(node: Node, than: Node) -> bool:
    return _dtype(node).is_floating_point and _dtype(node).itemsize > _dtype(than).itemsize


def _is_per_channel(operand: Any, conv: Node, weight_only: set[Node]) -> bool:
    """Return whether an operand is a number, or has one value for each channel (dimension 1 of the result)."""
    if isinstance(operand, (int, float)):
        return True
    if operand not in weight_only:
        return False
    value, result = operand.meta["val"], conv.meta["val"]
    if not value.dtype.is_floating_point or value.dim() > result.dim():
        return False
    first = result.dim() - value.dim()
    return all(size == 1 or (d == 1 and size == result.shape[1]) for d, size in enumerate(value.shape, first))


def _absorb(graph: Graph, conv: Node, steps: list[tuple[Node, Any]]) -> None:
    x, old_weight, bias, *settings = conv.args
    last, result = steps[-1][0], conv.meta["val"]
    dtype = _dtype(last)

    def call(target: Any, *arguments: Any, **kwargs: Any) -> Node:
        return _torch.graphs.add_node(graph, target, arguments, kwargs)

    def cast(node: Node, to: torch.dtype) -> Node:
        return node if _dtype(node) == to else call(_CAST, node, to)

    def number(value: float) -> Node:
        return call(_aten.full.default, [1] * (result.dim() - 1), value, dtype=dtype, device=result.device)

    def per_channel(operand: Any, dims: int = result.dim() - 1) -> Any:
        """Return the operand with ``dims`` dimensions. The channels are the first dimension."""
        return operand if not isinstance(operand, Node) else call(_aten.view.default, operand, [-1] + [1] * (dims - 1))

    def uncast(node: Any) -> Node:
        """Return the weight in the dtype of the arithmetic, if possible from before autocast's cast."""
        is_cast = node.target is _CAST and _dtype(node.args[0]) == dtype
        return node.args[0] if is_cast else cast(node, dtype)

    with graph.inserting_before(last):
        scale, shift = number(1.0), None if bias is None else per_channel(uncast(bias))
        for step, operand in steps:
            value = per_channel(operand)
            if step.target in _SCALING:
                scale = call(step.target, scale, value)
                shift = shift and call(step.target, shift, value)
            else:
                shift = call(step.target, shift or number(0.0), value)
        # The channels are the first dimension of the weight.
        factor = per_channel(scale, old_weight.meta["val"].dim())  # type: ignore[union-attr]
        weight = cast(call(_aten.mul.Tensor, uncast(old_weight), factor), _dtype(old_weight))  # type: ignore[arg-type]
        scaled = cast(call(_aten.convolution.default, x, weight, None, *settings), dtype)
        last.replace_all_uses_with(scaled if shift is None else call(_aten.add.Tensor, scaled, shift))
