"""Custom Inductor graph passes: base classes, and helpers for writing passes."""

from compile_callbacks.passes.base import GraphPass, graph_pass
from compile_callbacks.passes.manager import GraphPassError, PassRun
from compile_callbacks.passes.record_graphs import RecordedGraph, RecordGraphs
from compile_callbacks.passes.rewriting import call_before, count_ops, find_nodes, replace_node

__all__ = [
    "GraphPass",
    "GraphPassError",
    "PassRun",
    "RecordGraphs",
    "RecordedGraph",
    "call_before",
    "count_ops",
    "find_nodes",
    "graph_pass",
    "replace_node",
]
