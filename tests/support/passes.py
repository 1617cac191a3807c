"""Passes that keep torch's cache out of a test. Some change the results of a graph."""

from __future__ import annotations

import sys
import time

import torch

from compile_callbacks import GraphPass


class Uncached(GraphPass):
    """Changes nothing; has torch leave its cache alone, so that every compile is a real one."""

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        pass

    def uuid(self) -> None:
        return None


class Slow(Uncached):
    """Takes this time for each graph."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, graph: torch.fx.Graph, is_inference: bool) -> None:
        time.sleep(self.seconds)


class WrongForward(Uncached):
    """Replaces ReLU by a negation in the forward graphs of a phase.

    Args:
        phase: The phase.
        batch_sizes: Only graphs with an input of such a size in the first dimension are changed; by default all.
    """

    def __init__(self, phase, *batch_sizes):
        self.wrong_phase = phase
        self.batch_sizes = set(batch_sizes)

    def __call__(self, graph, is_inference):
        sizes = (size for node in graph.find_nodes(op="placeholder") for size in node.meta["val"].shape[:1])
        if self.phase != self.wrong_phase or (self.batch_sizes and self.batch_sizes.isdisjoint(sizes)):
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default


class Doubling(Uncached):
    """Doubles the results of these operators, or multiplies them by another factor."""

    def __init__(self, *operators, factor=2.0):
        self.operators, self.factor = operators, factor

    def __call__(self, graph, is_inference):
        for node in [node for node in graph.nodes if node.target in self.operators]:
            with graph.inserting_after(node):
                double = graph.call_function(torch.ops.aten.mul.Tensor, (node, self.factor))
            double.meta.update(node.meta)
            node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)


class WrongRows(Uncached):
    """Multiplies some rows of each tensor, or of those of a shape, that the forward or the backward graph returns."""

    def __init__(self, graph, shape=None, start=0, stop=sys.maxsize, factor=0.0):
        self.graph, self.shape, self.rows, self.factor = graph, shape, (start, stop), factor

    def __call__(self, graph, is_inference):
        output, aten = graph.output_node(), torch.ops.aten
        if any(node.name.startswith("tangents") for node in graph.nodes) != (self.graph == "backward"):
            return
        returned = [node for node in output.args[0] if node is not None]
        for node in [node for node in returned if self.shape in (None, node.meta["val"].shape)]:
            with graph.inserting_before(output):
                rows = graph.call_function(aten.slice.Tensor, (node, 0, *self.rows))
                wrong = graph.call_function(aten.mul.Tensor, (rows, self.factor))
                changed = graph.call_function(aten.slice_scatter.default, (node, wrong, 0, *self.rows))
            changed.meta["val"] = node.meta["val"]
            output.replace_input_with(node, changed)
