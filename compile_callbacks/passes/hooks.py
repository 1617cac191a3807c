"""The points at which Inductor runs custom passes, and what a graph is there."""

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
"""The hook points in the order in which they come, and the Inductor option behind each."""

DEFAULT_HOOK = "post_grad_post"

GraphKind = Literal["module", "joint", "forward", "backward", "inference"]
"""What a graph holds: the module's own calls, before autograd; forward and backward in one; one of them; or all that
there is, where there is no autograd."""


def graph_kind(hook: str, graph: Graph) -> GraphKind:
    """What a graph at a hook point holds, by the names that AOTAutograd gives inputs."""
    if hook == "pre_grad":
        return "module"
    inputs = [str(node.target) for node in graph.find_nodes(op="placeholder")]
    if hook.startswith("joint"):
        return "joint" if any(name.startswith(("primals", "tangents")) for name in inputs) else "inference"
    if any(name.startswith("tangents") for name in inputs):
        return "backward"
    return "forward" if any(name.startswith("primals") for name in inputs) else "inference"


def is_inference_graph(hook: str, graph: Graph) -> bool:
    """Whether no autograd graph is behind a graph: torch's own answer where it has one.

    - ``post_grad_pre``, ``post_grad_post``: what torch tells its own post-grad passes.
    - ``joint_pre``, ``joint_post``: a joint graph of forward and backward is for training; torch runs these passes on
      inference graphs too.
    - ``pre_grad``: there is no autograd graph yet. True where grad is disabled or no input requires grad; AOTAutograd
      also makes an inference graph where no output does, which is not known here.
    """
    if hook == "pre_grad":
        return not (torch.is_grad_enabled() and _any_input_requires_grad(graph))
    if hook.startswith("joint"):
        return graph_kind(hook, graph) == "inference"
    return _torch.passes.inference_flag_of_caller()


def _any_input_requires_grad(graph: Graph) -> bool:
    values = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
    owner = graph.owning_module
    owned = [*owner.parameters()] if owner is not None else []
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in [*values, *owned])
