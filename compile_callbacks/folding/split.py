"""Splits an inference graph into the part that depends only on weights, and the rest."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from compile_callbacks import _torch
from compile_callbacks.folding.scales import absorb_scales

_aten = torch.ops.aten

# Operators that read a whole tensor from memory. Inductor generates the code of all others, and fuses the computation
# of their inputs, at the cost of reading the sources.
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
    """An inference graph in two halves.

    Attributes:
        weights: Computes the folded tensors: ``(*folded, *weights) -> ()``, where ``folded`` is memory to write to.
        reads: The indices of ``weights`` among the arguments of the whole graph.
        main: Computes the rest: ``(*folded, *others) -> outputs``.
        keeps: The indices of ``others`` among the arguments of the whole graph.
        static: The indices of the arguments of ``main`` whose addresses are constant.
        folded: The folded tensors, as fake tensors.
    """

    weights: GraphModule
    reads: tuple[int, ...]
    main: GraphModule
    keeps: tuple[int, ...]
    static: tuple[int, ...]
    folded: tuple[torch.Tensor, ...]

    @property
    def folded_bytes(self) -> int:
        """The memory of the folded tensors."""
        return sum(map(_bytes, self.folded))


def split(module: GraphModule, static: Collection[int], limit_bytes: int) -> Split | None:
    """Split an inference graph into the part that depends only on weights, and the rest.

    Args:
        module: The graph, which is not changed.
        static: The indices of weights among its arguments.
        limit_bytes: The maximum memory of the folded tensors.

    Returns:
        The halves; ``None`` if folding saves nothing.
    """
    graph = _copy(module.graph)
    placeholders = graph.find_nodes(op="placeholder")
    weights = {placeholders[i] for i in static if _is_plain(placeholders[i].meta.get("val"))} - _mutated(graph)
    if not weights:
        return None
    left = limit_bytes

    def fits(weight: Node) -> bool:
        nonlocal left
        needed = _bytes(weight.meta["val"])
        if needed > left:
            return False
        left -= needed
        return True

    absorb_scales(graph, lambda: _depending_on(graph, weights), fits)
    if _torch.inductor.wants_channels_last(GraphModule(module, graph)):
        _lay_out_for_convolutions(graph, _depending_on(graph, weights))
    cut = _worth_folding(graph, weights, limit_bytes)
    if not cut:
        return None
    return _halves(module, graph, placeholders, cut, static)


def _copy(graph: Graph) -> Graph:
    copied = Graph()
    nodes: dict[Node, Node] = {}
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, nodes.__getitem__)
    return copied


# ------------------------------------------------------------------------------------------ what depends on weights


def _is_plain(value: Any) -> bool:
    """Whether a value is one tensor whose sizes, strides and offset are known while compiling."""
    if not isinstance(value, torch.Tensor):
        return False
    layout = (*value.shape, *value.stride(), value.storage_offset()) if value.layout is torch.strided else (None,)
    return all(type(number) is int for number in layout)


def _mutated(graph: Graph) -> set[Node]:
    """The placeholders that a graph writes to, or passes to a function whose side effects are unknown."""
    written = set()
    for node in graph.nodes:
        if node.op != "call_function" or (isinstance(node.target, _torch.graphs.OpOverload) and not _mutates(node)):
            continue
        if node.target is not operator.getitem:
            written |= {source for source in node.all_input_nodes if source.op == "placeholder"}
    return written


def _mutates(node: Node) -> bool:
    return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]


def _depending_on(graph: Graph, weights: Collection[Node], left_out: Collection[Node] = ()) -> set[Node]:
    """The weights, and the nodes that are computed only from weights and constants."""
    # The user must not hold memory that the weight half overwrites.
    returned = _returned(graph)
    constants: set[Node] = set()
    depending = set(weights)
    for node in graph.nodes:
        if not _is_pure(node):
            continue
        sources = node.all_input_nodes
        if all(source in constants for source in sources):
            constants.add(node)
        elif node in returned or node in left_out:
            continue
        elif all(source in depending or source in constants for source in sources):
            depending.add(node)
    return depending


def _returned(graph: Graph) -> set[Node]:
    """The nodes that own the memory of a graph's outputs."""
    returned = set(graph.output_node().all_input_nodes)
    for node in reversed(graph.nodes):
        if node in returned and node.op == "call_function" and _is_view(node):
            returned.add(node.args[0])
    return returned


def _is_pure(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)  # of an operator with several results
    if node.op not in ("call_function", "get_attr") or not all(map(_is_plain, values)):
        return False
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, _torch.graphs.OpOverload)
        and not _mutates(node)
        and not node.is_impure()
        and torch.Tag.nondeterministic_seeded not in node.target.tags
    )


def _is_view(node: Node) -> bool:
    """Whether a node's value is a view of its first argument."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    return isinstance(node.target, _torch.graphs.OpOverload) and any(
        returned.alias_info is not None for returned in node.target._schema.returns
    )


# ------------------------------------------------------------------------------------------ what is worth it


def _bytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def _lay_out_for_convolutions(graph: Graph, depending: set[Node]) -> None:
    """Convert weights to the layout that Inductor uses for convolutions; else it copies them on each call."""
    for node in graph.find_nodes(op="call_function", target=_aten.convolution.default):
        weight = node.args[1]
        if weight not in depending or weight.meta["val"].dim() != 4:
            continue
        if weight.meta["val"].is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_before(node):
            laid_out = _torch.graphs.add_node(
                graph, _aten.clone.default, (weight,), {"memory_format": torch.channels_last}
            )
        node.update_arg(1, laid_out)


def _worth_folding(graph: Graph, weights: set[Node], limit_bytes: int) -> list[Node]:
    """The nodes to cut at, in the graph's order, chosen by the memory traffic that folding saves."""
    left_out: set[Node] = set()
    while True:
        depending = _depending_on(graph, weights, left_out)
        sources = _sources(graph, depending, weights)
        edge = [node for node in graph.nodes if node in depending - weights and _is_cut(node, depending)]
        unwanted = {node for node in edge if not _saves_traffic(node, sources[node], depending)}
        if not unwanted:
            unwanted = _beyond(limit_bytes, edge, sources)
        if not unwanted:
            return edge
        left_out |= unwanted


def _beyond(limit_bytes: int, nodes: Sequence[Node], sources: Mapping[Node, set[Node]]) -> set[Node]:
    """The nodes to leave out to stay below a limit: those that save the least traffic per byte."""
    total = 0
    beyond = set()
    for node in sorted(nodes, key=lambda node: -_total_bytes(sources[node]) / max(1, _bytes(node.meta["val"]))):
        total += _bytes(node.meta["val"])
        if total > limit_bytes:
            beyond.add(node)
    return beyond


def _sources(graph: Graph, depending: set[Node], weights: set[Node]) -> dict[Node, set[Node]]:
    """The weights that each node depends on."""
    sources: dict[Node, set[Node]] = {}
    for node in graph.nodes:
        if node in depending:
            here = {node} if node in weights else set()
            sources[node] = here.union(*(sources.get(source, set()) for source in node.all_input_nodes))
    return sources


def _is_cut(node: Node, depending: set[Node]) -> bool:
    """Whether the rest of the graph reads a node's own memory, directly or through views."""
    return _is_plain(node.meta["val"]) and not _is_view(node) and bool(_readers(node, depending))


def _readers(node: Node, depending: set[Node]) -> set[Node]:
    """The nodes that read a node's memory and do not depend only on weights."""
    readers = set()
    for user in node.users:
        if user not in depending:
            readers.add(user)
        if _is_view(user) and user.args[0] is node:
            readers |= _readers(user, depending) if user in depending else set(user.users)
    return readers


def _saves_traffic(node: Node, sources: Iterable[Node], depending: set[Node]) -> bool:
    read_from_memory = any(
        isinstance(reader.target, _torch.graphs.OpOverload) and reader.target.overloadpacket in _READS_FROM_MEMORY
        for reader in _readers(node, depending)
    )
    return read_from_memory or _bytes(node.meta["val"]) <= _total_bytes(sources)


def _total_bytes(nodes: Iterable[Node]) -> int:
    return sum(_bytes(node.meta["val"]) for node in nodes)


# ------------------------------------------------------------------------------------------ the cut


def _halves(
    module: GraphModule,
    graph: Graph,
    placeholders: Sequence[Node],
    cut: Sequence[Node],
    static: Collection[int],
) -> Split:
    order = {node: place for place, node in enumerate(placeholders)}
    needed = _ancestors(cut)
    reads = [node for node in placeholders if node in needed]
    weights = _weight_half(graph, cut, needed, reads)
    main, kept = _main_half(graph, cut, [node for node in placeholders if order[node] not in static])
    keeps = tuple(order[node] for node in kept)
    return Split(
        weights=GraphModule(module, weights),
        reads=tuple(order[node] for node in reads),
        main=GraphModule(module, main),
        keeps=keeps,
        static=(*range(len(cut)), *(len(cut) + i for i, place in enumerate(keeps) if place in static)),
        folded=tuple(node.meta["val"] for node in cut),
    )


def _ancestors(nodes: Iterable[Node]) -> set[Node]:
    found: set[Node] = set()
    open_ = list(nodes)
    while open_:
        node = open_.pop()
        if node not in found:
            found.add(node)
            open_ += node.all_input_nodes
    return found


def _folded_placeholders(graph: Graph, cut: Sequence[Node]) -> list[Node]:
    placeholders = []
    for i, node in enumerate(cut):
        placeholder = graph.placeholder(f"folded_{i}")
        placeholder.meta["val"] = node.meta["val"]
        placeholders.append(placeholder)
    return placeholders


def _weight_half(graph: Graph, cut: Sequence[Node], needed: Collection[Node], reads: Sequence[Node]) -> Graph:
    half = Graph()
    folded = _folded_placeholders(half, cut)
    nodes = {node: half.node_copy(node) for node in reads}
    for node in graph.nodes:
        if node in needed and node not in nodes:
            nodes[node] = half.node_copy(node, nodes.__getitem__)
    for memory, node in zip(folded, cut, strict=True):
        written = half.call_function(_aten.copy_.default, (memory, nodes[node]))
        written.meta["val"] = memory.meta["val"]
    half.output(()).meta["user_visible_output_idxs"] = []
    half.lint()
    return half


def _main_half(graph: Graph, cut: Sequence[Node], inputs: Collection[Node]) -> tuple[Graph, list[Node]]:
    """The rest of the graph, and the placeholders of the whole graph that it still has."""
    half = Graph()
    nodes: dict[Node, Node] = dict(zip(cut, _folded_placeholders(half, cut), strict=True))
    for node in graph.nodes:
        if node not in nodes:
            nodes[node] = half.node_copy(node, nodes.__getitem__)
    half.eliminate_dead_code()
    kept = []
    for node in graph.find_nodes(op="placeholder"):
        if node in inputs or nodes[node].users:
            kept.append(node)
        else:
            half.erase_node(nodes[node])
    half.lint()
    return half, kept
