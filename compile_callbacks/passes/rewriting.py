"""Helpers that rewrite graphs of ATen operators: functions that find, count, insert and replace nodes.

The functions work at ``"joint_pre"`` and later hook points. New nodes get ``meta["val"]``, from which Inductor reads
shapes, dtypes and devices.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code


def find_nodes(graph: Graph, *targets: Any) -> list[Node]:
    """Return the nodes that call one of the operators, in the graph's order.

    Args:
        graph: The graph to search.
        targets: Operators, such as ``torch.ops.aten.mul.Tensor``, or ``torch.ops.aten.mul`` for all its overloads.

    Raises:
        TypeError: If a target is not an operator.
    """
    for target in targets:
        if not isinstance(target, _torch.graphs.OPERATOR_TYPES):
            text = f"target={target!r} must be an operator such as torch.ops.aten.mul.Tensor"
            raise TypeError(with_code("CC202", text))
    return [
        node
        for node in graph.nodes
        if node.op == "call_function"
        and (node.target in targets or getattr(node.target, "overloadpacket", None) in targets)
    ]


def count_ops(graph: Graph) -> Counter[str]:
    """Return the number of calls of each operator, by operator name, such as ``"aten.mul.Tensor"``."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def call_before(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Insert a call of an operator before a node, and return the new node.

    Args:
        node: The node before which the function inserts the call.
        target: The operator to call, such as ``torch.ops.aten.mul.Tensor``.
        args: The operator's positional arguments: nodes and numbers.
        kwargs: The operator's keyword arguments.

    Raises:
        ValueError: If an argument is a node without ``meta["val"]``, as at ``"pre_grad"``, or if Inductor has no code
            for the operator. Inductor has no code for operators that it decomposes before the passes run.
    """
    if _torch.graphs.is_decomposed(target):
        text = f"Inductor has no code for {target} at this hook point, because it decomposes the operator earlier"
        raise ValueError(with_code("CC702", text))
    for source in tree_leaves((args, kwargs)):
        if isinstance(source, Node) and "val" not in source.meta:
            text = f"node {source.name!r} has no meta['val'], which nodes get after 'pre_grad'"
            raise ValueError(with_code("CC702", text))
    with node.graph.inserting_before(node):
        return _torch.graphs.add_node(node.graph, target, args, kwargs)


def replace_node(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Replace a node by a call of another operator, and return the new node.

    Args:
        node: The node to replace. The function erases it.
        target: The operator to call instead, such as ``torch.ops.aten.mul.Tensor``.
        args: The operator's positional arguments: nodes and numbers.
        kwargs: The operator's keyword arguments.

    Raises:
        ValueError: If the new value has another shape, dtype or device, or for the reasons that `call_before` lists.
    """
    new = call_before(node, target, *args, **kwargs)
    before, after = _layout(node), _layout(new)
    if before != after:
        new.graph.erase_node(new)
        text = f"{target} returns {after}, and cannot replace {node.name!r}, which is {before}"
        raise ValueError(with_code("CC702", text))
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _layout(node: Node) -> Any:
    return [
        f"{value.dtype}{list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value
        for value in tree_leaves(node.meta.get("val"))
    ]
