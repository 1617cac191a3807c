"""Functions that examine the nodes of captured graphs."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from compile_callbacks import _torch

_EMPTY = (torch.empty, torch.empty_like, torch.empty_permuted, torch.empty_strided, "new_empty", "new_empty_strided")
_LOCAL = ("", "aten", "prims", "prim", "torchvision", "torchaudio")  # the namespaces of operators in one process


def communicates(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph communicates with other processes, as custom operators in a process group may."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    in_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    return in_group and any(
        _torch.graphs.namespace(node) not in _LOCAL
        or str(getattr(node.target, "__module__", "")).startswith("torch.distributed")
        or isinstance(node.meta.get("example_value"), dtensor)
        for node in _torch.graphs.all_nodes(graph_module)
    )


def has_unknown_size(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a value of Dynamo's graph has a size that depends on values of tensors."""
    values = [node.meta.get("example_value") for node in _torch.graphs.all_nodes(graph_module)]
    return any(free_unbacked_symbols(value.shape) for value in values if isinstance(value, torch.Tensor))


def uninitialized_outputs(graph_module: torch.fx.GraphModule) -> frozenset[int]:
    """Return the positions of the outputs that no operator writes, such as of ``torch.empty`` before a graph break."""
    output = graph_module.graph.output_node()
    empty = [node for node in graph_module.graph.nodes if node.target in _EMPTY]
    return frozenset(
        i
        for i, node in enumerate(output.args[0])  # type: ignore[arg-type]
        if node in empty and node.users.keys() == {output}
    )


def written_statistics(graph_module: torch.fx.GraphModule) -> frozenset[int]:
    """Return the positions of the inputs that an `eager_graph` only uses as running statistics of batch norms."""
    placeholders = enumerate(graph_module.graph.find_nodes(op="placeholder"))
    return frozenset(
        i
        for i, value in placeholders
        if value.users and all(_writes_statistics(graph_module, user, value) for user in value.users)
    )


def _writes_statistics(graph_module: torch.fx.GraphModule, user: Any, value: torch.fx.Node) -> bool:
    """Return whether a batch norm in training writes a value. It does not read it."""
    at = {i for i, argument in enumerate(user.args) if argument is value}
    if user.target in _torch.graphs.SUBGRAPH_CALLS:
        return {i - 1 for i in at} <= written_statistics(getattr(graph_module, user.args[0].target))
    # batch_norm(input, running_mean, running_var, weight, bias, training, ...)
    return user.target is torch.nn.functional.batch_norm and at <= {1, 2} and user.args[5:6] == (True,)
