"""Helpers for passes: functions that find, count, insert and replace nodes, and a pass that records graphs.

The functions work at ``"joint_pre"`` and later hook points. New nodes get ``meta["val"]``, from which Inductor reads
shapes, dtypes and devices.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from torch.fx import Graph, Node

from compile_callbacks import _torch
from compile_callbacks.passes.base import DEFAULT_HOOK, GraphPass, graph_kind


def find_nodes(graph: Graph, *targets: Any) -> list[Node]:
    """Return the nodes that call one of the operators, in the graph's order.

    Args:
        graph: The graph to search.
        targets: Operators, such as ``torch.ops.aten.mul.Tensor``, or ``torch.ops.aten.mul`` for all its overloads.
    """
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
    """
    with node.graph.inserting_before(node):
        return _torch.graphs.add_node(node.graph, target, args, kwargs)


def replace_node(node: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """Replace a node by a call of another operator, and return the new node.

    Args:
        node: The node to replace. The function erases it.
        target: The operator to call instead, such as ``torch.ops.aten.mul.Tensor``. Its result must have the same
            shape, dtype and device.
        args: The operator's positional arguments: nodes and numbers.
        kwargs: The operator's keyword arguments.
    """
    new = call_before(node, target, *args, **kwargs)
    new.meta = {**node.meta, "val": new.meta["val"]}
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new


class RecordedGraph(NamedTuple):
    """A graph as text.

    Attributes:
        title: The number, phase, kind and hook point, such as ``"000_infer_inference_post_grad_post"``.
        kind: ``"module"``, the module's calls before autograd; ``"joint"``, forward and backward in one graph;
            ``"forward"`` or ``"backward"``; and ``"inference"``, a graph without a backward pass.
        text: The text, with one line for each node.
        ops: The number of calls of each operator, by operator name, such as ``"aten.mul.Tensor"``.
    """

    title: str
    kind: str
    text: str
    ops: Counter[str]


class RecordGraphs(GraphPass):
    """Writes each graph to a file, and to TensorBoard's text tab at the end of a run.

    The pass does not change the graph. With this pass, torch does not use its compile cache, so the pass gets each
    graph. A line of a graph looks like this::

        mul: "f32[4, 16]" = torch.ops.aten.mul.Tensor(linear, 0.5)

    Args:
        folder: The folder for the files, whose names are `RecordedGraph.title`. If ``None``, the pass writes no files.
        hook: The hook point. See `GraphPass`. Passes at one hook point run in the order of ``passes``. To see the
            changes of a pass, put one `RecordGraphs` before the pass and one after it.

    Example::

        >>> record = RecordGraphs(hook="joint_post")
        >>> record.graphs
        []
    """

    def __init__(self, folder: str | Path | None = None, *, hook: str = DEFAULT_HOOK) -> None:
        self.hook, self.folder = hook, None if folder is None else Path(folder)
        self.graphs: list[RecordedGraph] = []

    def __call__(self, graph: Graph, is_inference: bool) -> None:
        """Record the graph."""
        kind = graph_kind(self.hook, graph)
        title = f"{len(self.graphs):03d}_{self.phase or 'no_phase'}_{kind}_{self.hook}"
        text = graph.python_code("self", verbose=True).src
        self.graphs.append(RecordedGraph(title, kind, text, count_ops(graph)))
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{title}.txt").write_text(text)

    def uuid(self) -> None:
        """Return ``None``, so that torch compiles each graph again instead of loading it from its cache."""
        return
