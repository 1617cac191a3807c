"""To find, count and replace the nodes of a graph of ATen operators, with their ``meta["val"]`` kept right.

For passes at the hook points from ``"joint_pre"`` on. Inductor reads shapes, types and devices from ``meta["val"]``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch


def find_nodes(graph: Graph, *targets: Any) -> list[Node]:
    """The calls of some operators, in the graph's order.

    Args:
        graph: The graph.
        targets: Operators, ``torch.ops.aten.mul.Tensor``, or all overloads of one, ``torch.ops.aten.mul``.

    Raises:
        TypeError: A target that is no operator.
    """
    for target in targets:
        if not isinstance(target, _torch.graphs.OPERATOR_TYPES):
            raise TypeError(f"target={target!r} must be an operator such as torch.ops.aten.mul.Tensor")
    return [node for node in graph.nodes if node.op == "call_function" and _is_one_of(node.target, targets)]


def count_ops(graph: Graph) -> Counter[str]:
    """How often each operator is called, by its name: ``"aten.mul.Tensor"``."""
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_function")


def call_before(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new call in front of a node.

    Args:
        node: The node.
        target: The operator.
        args: Its arguments, nodes and numbers.
        kwargs: Those by name.

    Raises:
        ValueError: An argument is a node without ``meta["val"]``, as those of a graph at ``"pre_grad"`` are, or an
            operator that Inductor writes out before its passes run, and has no code for after that.
    """
    if _torch.graphs.is_decomposed(target):
        raise ValueError(f"Inductor has no code for {target} here: before its passes run it writes it out in others")
    for source in _nodes((args, kwargs)):
        if "val" not in source.meta:
            raise ValueError(f"node {source.name!r} has no meta['val']; graphs at 'pre_grad' have none yet")
    with node.graph.inserting_before(node):
        return _torch.graphs.add_node(node.graph, target, args, kwargs)


def replace_node(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Put a call of another operator in a node's place.

    Args:
        node: The node, which is erased.
        target: The operator.
        args: Its arguments, nodes and numbers.
        kwargs: Those by name.

    Returns:
        The new node.

    Raises:
        ValueError: Its value is of another shape, type or device.
    """
    new = call_before(node, target, *args, **kwargs)
    before, after = _layout(node), _layout(new)
    if before != after:
        new.graph.erase_node(new)
        raise ValueError(f"{target} gives {after} in place of {node.name!r}, which is {before}")
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


def _is_one_of(target: Any, targets: Collection[Any]) -> bool:
    return target in targets or getattr(target, "overloadpacket", None) in targets


def _nodes(value: Any) -> list[Node]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]


def _layout(node: Node) -> Any:
    return [
        f"{value.dtype}{list(value.shape)} on {value.device}" if isinstance(value, torch.Tensor) else value
        for value in tree_leaves(node.meta.get("val"))
    ]
