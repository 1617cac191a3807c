"""Splits an inference graph into a constant subgraph, which depends only on weights, and the main subgraph.

Before, `absorb_scales` moves per-channel arithmetic after a convolution, such as a batch norm, into its weight.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compile_callbacks import _torch

_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_SCALING = (_aten.mul.Tensor, _aten.div.Tensor)
_STEPS = (*_SCALING, _aten.add.Tensor, _aten.sub.Tensor)
_COMMUTATIVE = (_aten.mul.Tensor, _aten.add.Tensor)


# Operators that read a whole tensor from memory. For all other operators, Inductor generates code that computes their
# inputs in the same kernel.
_READS_FROM_MEMORY = (
    _aten.convolution,
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten._scaled_mm,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu,
)


@dataclass(frozen=True)
class Split:
    """An inference graph as two subgraphs."""

    constants: GraphModule  # (*folded, *weights) -> (): computes the folded tensors, and writes them to `folded`
    reads: tuple[int, ...]  # the indices of `weights` among the arguments of the whole graph
    main: GraphModule  # (*folded, *others) -> outputs
    keeps: tuple[int, ...]  # the indices of `others` among the arguments of the whole graph
    static: tuple[int, ...]  # the indices of the arguments of `main` whose addresses are constant
    folded: tuple[torch.Tensor, ...]  # the folded tensors, as fake tensors


def split(module: GraphModule, static: Collection[int], limit_bytes: int) -> Split | None:
    """Split a copy of an inference graph, or return ``None`` if folding saves nothing.

    The arguments of the graph at the indices ``static`` are weights. The folded tensors take at most ``limit_bytes``.
    """
    graph = copy.deepcopy(module.graph)
    placeholders = graph.find_nodes(op="placeholder")
    weights = {placeholders[i] for i in static if _is_plain(placeholders[i].meta.get("val"))} - _mutated(graph)
    if not weights:
        return None
    absorb_scales(graph, _depending_on(graph, weights), limit_bytes)
    if _torch.inductor.wants_channels_last(GraphModule(module, graph)):
        _use_channels_last(graph, _depending_on(graph, weights))
    cut = _choose_cut(graph, weights, limit_bytes)
    if not cut:
        return None
    index = {node: i for i, node in enumerate(placeholders)}
    constants, reads = _constant_subgraph(graph, cut)
    with graph.inserting_before(placeholders[0]):
        for i, node in enumerate(cut):
            node.replace_all_uses_with(_folded_placeholder(graph, i, node))
    graph.eliminate_dead_code()
    # Keep unused inputs, because Inductor reads the sizes of dynamic shapes from them.
    keeps = [node for node in placeholders if index[node] not in static or node.users]
    for node in set(placeholders) - set(keeps):
        graph.erase_node(node)
    graph.lint()
    return Split(
        constants=GraphModule(module, constants),
        reads=tuple(index[node] for node in reads),
        main=GraphModule(module, graph),
        keeps=tuple(index[node] for node in keeps),
        static=(*range(len(cut)), *(i for i, node in enumerate(keeps, len(cut)) if index[node] in static)),
        folded=tuple(node.meta["val"] for node in cut),
    )


def _constant_subgraph(graph: Graph, cut: Sequence[Node]) -> tuple[Graph, list[Node]]:
    """Return the constant subgraph, and the placeholders of the whole graph that it reads."""
    subgraph = Graph()
    memory = [_folded_placeholder(subgraph, i, node) for i, node in enumerate(cut)]
    nodes: dict[Node, Node] = {}
    needed = _ancestors(cut)
    for node in graph.nodes:
        if node in needed:
            nodes[node] = subgraph.node_copy(node, nodes.__getitem__)
    for placeholder, node in zip(memory, cut, strict=True):
        written = subgraph.call_function(_aten.copy_.default, (placeholder, nodes[node]))
        written.meta["val"] = placeholder.meta["val"]
    subgraph.output(()).meta["user_visible_output_idxs"] = []
    subgraph.lint()
    return subgraph, [node for node in graph.find_nodes(op="placeholder") if node in needed]


def _folded_placeholder(graph: Graph, number: int, node: Node) -> Node:
    placeholder = graph.placeholder(f"folded_{number}")
    placeholder.meta["val"] = node.meta["val"]
    return placeholder


def _is_plain(value: Any) -> bool:
    """Return whether a value is one tensor whose sizes, strides and offset are known at compile time."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return False
    return all(type(number) is int for number in (*value.shape, *value.stride(), value.storage_offset()))


def _mutated(graph: Graph) -> set[Node]:
    """Return the placeholders that a graph writes, or passes to a function with unknown side effects."""
    writers = [
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and _may_mutate(node)
    ]
    return {source for node in writers for source in node.all_input_nodes if source.op == "placeholder"}


def _may_mutate(node: Node) -> bool:
    return not isinstance(node.target, _torch.graphs.OpOverload) or node.target._schema.is_mutable


def _depending_on(graph: Graph, weights: Collection[Node], left_out: Collection[Node] = ()) -> set[Node]:
    """Return the weights, and the nodes that depend only on weights and constants."""
    returned = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):  # because the constant subgraph must not overwrite memory that the user gets
        if node in returned and node.op == "call_function" and _is_view(node):
            returned.add(node.args[0])
    constants, depending = set[Node](), set(weights)
    for node in filter(_is_pure, graph.nodes):
        sources = node.all_input_nodes
        if all(source in constants for source in sources):
            constants.add(node)
        elif node not in returned and node not in left_out and all(s in depending or s in constants for s in sources):
            depending.add(node)
    return depending


def _is_pure(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)  # an operator may have several results
    if node.op not in ("call_function", "get_attr") or not all(map(_is_plain, values)):
        return False
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not _may_mutate(node) and not node.is_impure() and not is_random


def _is_view(node: Node) -> bool:
    """Return whether the value of a node is a view of its first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    returns = node.target._schema.returns if isinstance(node.target, _torch.graphs.OpOverload) else ()
    return any(returned.alias_info is not None for returned in returns)


def _use_channels_last(graph: Graph, depending: set[Node]) -> None:
    """Convert weights to Inductor's layout for convolutions. Otherwise, Inductor would copy them in each call."""
    for node in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        weight = node.args[1]
        if weight not in depending or weight.meta["val"].dim() != 4:
            continue
        if not weight.meta["val"].is_contiguous(memory_format=torch.channels_last):
            layout = {"memory_format": torch.channels_last}
            with graph.inserting_before(node):
                node.update_arg(1, _torch.graphs.add_node(graph, _aten.clone.default, (weight,), layout))


def _choose_cut(graph: Graph, weights: set[Node], limit_bytes: int) -> list[Node]:
    """Return the nodes to fold, in the order of the graph. Folding must save more memory traffic than it adds."""
    left_out: set[Node] = set()
    while True:
        depending = _depending_on(graph, weights, left_out)
        readers = {
            node: _readers(node, depending)
            for node in graph.nodes
            if node in depending - weights and _is_plain(node.meta["val"]) and not _is_view(node)
        }
        cut = [node for node, found in readers.items() if found]
        traffic = {node: sum(weight.meta["val"].nbytes for weight in _ancestors([node]) & weights) for node in cut}
        unwanted = {
            node
            for node in cut
            if node.meta["val"].nbytes > traffic[node] and not any(map(_reads_from_memory, readers[node]))
        }
        if not unwanted:
            best = sorted(cut, key=lambda node: -traffic[node] / max(1, node.meta["val"].nbytes))
            totals = itertools.accumulate(node.meta["val"].nbytes for node in best)
            unwanted = {node for node, total in zip(best, totals, strict=True) if total > limit_bytes}
        if not unwanted:
            return cut
        left_out |= unwanted


def _readers(node: Node, depending: set[Node]) -> set[Node]:
    """Return the nodes that read the memory of a node, directly or through views, and depend on more than weights."""
    readers = {user for user in node.users if user not in depending}
    return readers.union(*(_readers(user, depending) for user in node.users if _is_view(user) and user.args[0] is node))


def _reads_from_memory(node: Node) -> bool:
    return isinstance(node.target, _torch.graphs.OpOverload) and node.target.overloadpacket in _READS_FROM_MEMORY


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    """Return the nodes and all nodes that they depend on."""
    found: set[Node] = set()
    open_ = list(nodes)
    while open_:
        if (node := open_.pop()) not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


# ------------------------------------------------------------------------------------------ scales


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
