"""The points at which Inductor runs custom passes, and the kind of graph at each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch.fx import Graph

from compile_callbacks import _torch

HOOK_OPTIONS: Mapping[str, str] = {
    "pre_grad": "pre_grad_custom_pass",
    "joint_pre": "joint_custom_pre_pass",
    "joint_post": "joint_custom_post_pass",
    "post_grad_pre": "post_grad_custom_pre_pass",
    "post_grad_post": "post_grad_custom_post_pass",
}
"""The hook points in the order in which Inductor runs them, each with its Inductor option."""

DEFAULT_HOOK = "post_grad_post"

GraphKind = Literal["module", "joint", "forward", "backward", "inference"]
"""The content of a graph: the module's calls before autograd, forward and backward in one graph, one of the two, or the
whole graph if there is no autograd."""


def graph_kind(hook: str, graph: Graph) -> GraphKind:
    """Return the kind of a graph at a hook point, from the names that AOTAutograd gives to inputs."""
    if hook == "pre_grad":
        return "module"
    inputs = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    if hook.startswith("joint"):
        return "joint" if any(name.startswith(("primals", "tangents")) for name in inputs) else "inference"
    if any(name.startswith("tangents") for name in inputs):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in inputs) else "inference"


def is_inference_graph(hook: str, graph: Graph) -> bool:
    """Return whether a graph has no autograd graph behind it.

    - ``post_grad_pre``, ``post_grad_post``: the flag that torch passes to its own post-grad passes.
    - ``joint_pre``, ``joint_post``: a joint graph is for training; torch runs these passes on inference graphs too.
    - ``pre_grad``: there is no autograd graph yet. The graph is for inference if grad is disabled or no input requires
      grad. AOTAutograd also creates an inference graph if no output requires grad, which is not known here.
    """
    if hook == "pre_grad":
        owner = graph.owning_module
        values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        values += owner.parameters() if owner is not None else []
        requires_grad = any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
        return not (torch.is_grad_enabled() and requires_grad)
    if hook.startswith("joint"):
        return graph_kind(hook, graph) == "inference"
    return _torch.passes.inference_flag_of_caller()
