"""Autograd and AOTAutograd: the backward passes of compiled graphs, and hooks on saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def outside_activation_checkpoints() -> Iterator[None]:
    """What runs within is no part of an activation checkpoint that it is called in, which counts what is saved.

    The innermost hooks on saved tensors are the ones that count. They are set only where there are any, which no public
    function tells: where torch has them disabled, setting some is an error.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    with torch.autograd.graph.saved_tensors_hooks(_same, _same) if hooks else contextlib.nullcontext():
        yield


def call_without_grad(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` as under `torch.no_grad`, which costs 1 µs a call in torch 2.11 to 2.15; this costs 0.2 µs.

    To be deleted when `torch.no_grad` costs as little.
    """
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_grad_enabled(before)


def saves_through_hooks() -> bool:
    """Whether hooks handle the tensors that are saved for backward, as in an activation checkpoint.

    They do in its forward pass and in its recomputation. No public function tells (2.11 to 2.15).
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def is_compiled_node(node: Any) -> bool:
    """Whether a node of autograd's graph is a compiled graph's backward pass."""
    return hasattr(getattr(node, "_forward_cls", None), "num_symints_saved_for_bw")


def wrap_backward(node: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have all backward passes of the graph that a compiled node is of run what ``wrap`` makes of theirs."""
    node._forward_cls.backward = staticmethod(wrap(node._forward_cls.backward))


def incoming_gradients(arguments: Sequence[Any]) -> Sequence[torch.Tensor | None]:
    """The gradients that a backward pass of a compiled node gets: from torch 2.13 on they come in a list."""
    return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments


def graph_is_kept() -> bool:
    """Whether the backward pass that runs keeps its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def mutated_inputs(node: Any) -> Sequence[int]:
    """Positions of the inputs that the graph of a compiled node changes."""
    return [i for i, info in enumerate(node._forward_cls.metadata.input_info) if info.mutates_data]


def has_custom_backward(graph_module: torch.fx.GraphModule) -> bool:
    """Whether a graph has an operator of higher order, which may hide from autograd how it computes its gradient.

    That of `torch.autograd.Function` does. That of an activation checkpoint does not.
    """
    from torch._ops import HigherOrderOperator

    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            higher_order = isinstance(node.target, HigherOrderOperator)
            if higher_order and node.target is not torch.ops.higher_order.tag_activation_checkpoint:
                return True
    return False


class _UnpackedOnce:
    """Autograd's node as a backward pass sees it, its saved tensors unpacked already: some hooks do that once."""

    def __init__(self, node: Any, saved: Sequence[torch.Tensor]) -> None:
        self._node = node
        self.saved_tensors = saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@contextlib.contextmanager
def donated_buffers_kept(node: Any) -> Iterator[Any]:
    """Within, a backward pass may keep its graph: saved tensors that it computes in are put back after it.

    Gives what the backward pass takes for the node.
    """
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    metadata, unpacked = node._forward_cls.metadata, node.saved_tensors
    saved, donated = [*unpacked, *node._tensors_no_vc_check], metadata.bw_donated_idxs
    # Counted from the symbolic integers on, which are the first of what a backward pass is given.
    buffers = [saved[index - node._forward_cls.num_symints_saved_for_bw] for index in donated or []]
    copies = [buffer.detach().clone() for buffer in buffers]
    metadata.bw_donated_idxs = []
    try:
        yield _UnpackedOnce(node, unpacked)
    finally:
        metadata.bw_donated_idxs = donated
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(buffers)):
            for buffer, copied in zip(buffers, copies, strict=True):
                buffer.copy_(copied)


def after_optimizer_steps(hook: Callable[..., None]) -> Any:
    """Call ``hook(optimizer, args, kwargs)`` after each step of every optimizer; ``remove()`` of the result ends it."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(hook)
