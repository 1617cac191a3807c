"""Custom Inductor graph passes: base classes, and helpers for writing passes."""

from compile_callbacks.passes.base import GraphPass, graph_pass
from compile_callbacks.passes.helpers import (
    RecordedGraph,
    RecordGraphs,
    call_before,
    count_ops,
    find_nodes,
    replace_node,
)
from compile_callbacks.passes.manager import GraphPassError

__all__ = [
    "GraphPass",
    "GraphPassError",
    "RecordGraphs",
    "RecordedGraph",
    "call_before",
    "count_ops",
    "find_nodes",
    "graph_pass",
    "replace_node",
]
