"""Graph passes that change what a graph computes."""

from __future__ import annotations

import torch

from compile_callbacks import GraphPass


class WrongForward(GraphPass):
    """Replaces ReLU by a negation in the forward graphs of a phase.

    Args:
        phase: The phase.
        batch_size: Only graphs with an input of this size in the first dimension are changed.
    """

    def __init__(self, phase, batch_size=None):
        self.wrong_phase = phase
        self.batch_size = batch_size

    def __call__(self, graph, is_inference):
        sizes = [node.meta["val"].shape[:1] for node in graph.find_nodes(op="placeholder")]
        if self.phase != self.wrong_phase or (self.batch_size and (self.batch_size,) not in sizes):
            return
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default):
            node.target = torch.ops.aten.neg.default

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
