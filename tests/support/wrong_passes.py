"""Graph passes that change what a graph computes."""

from __future__ import annotations

import torch

from compile_callbacks import GraphPass


class WrongForward(GraphPass):
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

    def uuid(self):
        return None


class Doubling(GraphPass):
    """Doubles the results of these operators, or multiplies them by another factor."""

    def __init__(self, *operators, hook="post_grad_post", factor=2.0):
        self.operators, self.hook, self.factor = operators, hook, factor

    def __call__(self, graph, is_inference):
        for node in [node for node in graph.nodes if node.target in self.operators]:
            with graph.inserting_after(node):
                double = graph.call_function(torch.ops.aten.mul.Tensor, (node, self.factor))
            double.meta.update(node.meta)
            node.replace_all_uses_with(double, delete_user_cb=lambda user, double=double: user is not double)

    def uuid(self):
        return None


class WrongBackward(GraphPass):
    """Negates the gradients that backward graphs compute; their norms stay the same."""

    def __call__(self, graph, is_inference):
        if not any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder")):
            return
        output = graph.output_node()
        for gradient in [node for node in output.args[0] if node is not None]:
            with graph.inserting_before(output):
                negated = graph.call_function(torch.ops.aten.neg.default, (gradient,))
            negated.meta["val"] = gradient.meta["val"]
            output.replace_input_with(gradient, negated)

    def uuid(self):
        return None


class WrongRows(GraphPass):
    """Multiplies some rows of a tensor of this shape that the forward or the backward graph returns."""

    def __init__(self, graph, shape, start, stop, factor=0.0):
        self.graph, self.shape, self.rows, self.factor = graph, shape, (start, stop), factor

    def __call__(self, graph, is_inference):
        output, aten = graph.output_node(), torch.ops.aten
        if any(node.name.startswith("tangents") for node in graph.nodes) != (self.graph == "backward"):
            return
        for node in [node for node in output.args[0] if node is not None and node.meta["val"].shape == self.shape]:
            with graph.inserting_before(output):
                rows = graph.call_function(aten.slice.Tensor, (node, 0, *self.rows))
                wrong = graph.call_function(aten.mul.Tensor, (rows, self.factor))
                changed = graph.call_function(aten.slice_scatter.default, (node, wrong, 0, *self.rows))
            changed.meta["val"] = node.meta["val"]
            output.replace_input_with(node, changed)

    def uuid(self):
        return None
