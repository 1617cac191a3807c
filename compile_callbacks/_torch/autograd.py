"""Wraps autograd and AOTAutograd: the backward passes of compiled graphs, and hooks on saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions

from compile_callbacks._torch.graphs import add_node

__all__ = ["preserve_versions"]


def outside_activation_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Hide the saved tensors of a ``with`` block from an activation checkpoint around it.

    A checkpoint counts the tensors that its hooks get, and autograd only calls the innermost hooks.
    """
    # Setting hooks raises an error if the user has disabled them, so set hooks only within other hooks.
    return torch.autograd.graph.saved_tensors_hooks(_same, _same) if saves_through_hooks() else contextlib.nullcontext()


def in_backward() -> bool:
    """Return whether the current thread runs a backward pass, in which activation checkpoints call modules again.

    Workaround (until torch has a public function for this): the function calls a private function of torch.
    """
    return torch._C._current_graph_task_id() != -1


def saves_through_hooks() -> bool:
    """Return whether hooks handle the tensors that are saved for backward, as in an activation checkpoint.

    Workaround (until torch has a public function for this): the function calls a private function of torch.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""Sets the grad mode.

Workaround (until `torch.set_grad_enabled` is as fast): it takes 1 µs per call in torch 2.11 to 2.15, and this takes
0.05 µs.
"""


def save_copies(forward_graph: torch.fx.GraphModule, buffers: Collection[int]) -> None:
    """Change a training graph so that it saves copies of its buffers, and of the inputs that it overwrites.

    Workaround (until the partitioner does not save inputs that are written before the backward pass): if the backward
    pass needs the former value of an input that the graph writes, torch 2.11 to 2.15 save the input itself, and its
    gradients are wrong. Both kinds of spectral norm do this. If the user's code copies a buffer, Inductor removes the
    copy and saves the buffer, which later code may write, as a queue of keys::

        before:  copy_(u, new_u); return y, u
        after:   saved = clone(u); copy_(u, new_u); return y, saved
    """
    graph, aten = forward_graph.graph, torch.ops.aten
    writes = graph.find_nodes(op="call_function", target=aten.copy_.default)
    inputs = graph.find_nodes(op="placeholder")
    overwritten = {_memory(value) for write in writes for value in write.args[:2]} | {
        _memory(inputs[i]) for i in buffers
    }
    if not overwritten:
        return
    # Inductor compiles ``lift_fresh_copy`` as a copy, but removes ``clone`` if it knows no reason for a copy. In the
    # mode "lite", it removes nothing, and would run the copy after the write, because an operator of torch writes.
    runs_operators = torch._inductor.config.fallback_by_default
    copy = aten.clone.default if runs_operators else aten.lift_fresh_copy.default
    output: Any = graph.output_node()
    results = list(output.args[0])
    context = torch._guards.TracingContext.get()
    for i in range(context.fw_metadata.num_forward, len(results)):  # type: ignore[union-attr]
        saved = results[i]
        if not isinstance(saved, torch.fx.Node) or _memory(saved) not in overwritten:
            continue
        with graph.inserting_after(inputs[-1] if saved.op == "placeholder" else saved):
            results[i] = add_node(graph, copy, (saved,))
    output.args = (tuple(results),)
    forward_graph.recompile()


def _memory(node: Any) -> object:
    """Return an object that is equal for all views of one tensor."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else node


graph_is_kept: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Returns whether the running backward pass keeps its graph (``retain_graph=True``).

Workaround (until torch has a public function for this): the function is a private function of torch.
"""


def overwrite_no_saved_tensors() -> None:
    """Let the backward pass of the graph that AOTAutograd compiles run more than once (``retain_graph=True``).

    Workaround (until AOTAutograd supports ``retain_graph=True`` with donated buffers): by default, the backward pass
    overwrites saved tensors (``bw_donated_idxs``), and raises an error if the graph is kept. While it compiles,
    ``torch._functorch.config.donated_buffer`` must be ``False``, so that it overwrites none. It still raises the error
    if the setting is ``True`` when it runs, unless the list is empty instead of missing (2.11 to 2.15).
    """
    torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs = []  # type: ignore[union-attr]


def is_captured_wrongly(graph_module: torch.fx.GraphModule) -> bool:
    """Return whether a graph of Dynamo contains a `torch.autograd.Function` that torch captures with wrong gradients.

    Workaround (torch<2.13): if an operator in ``forward`` changes a tensor in place, the captured function returns the
    tensor twice, and the gradient of the first copy gets lost.
    """
    if torch.__version__ >= "2.13":
        return False
    apply = torch.ops.higher_order.autograd_function_apply
    return any(
        _returns_twice(getattr(subgraph, call.args[0].target))
        for subgraph in graph_module.modules()
        if isinstance(subgraph, torch.fx.GraphModule)
        for call in subgraph.graph.find_nodes(op="call_function", target=apply)
    )


def _returns_twice(forward: Any) -> bool:
    """Return whether two outputs of the captured ``forward`` of an autograd function share their memory."""
    outputs, _ = forward.graph.output_node().args[0]  # the second entry contains the saved tensors
    values = [node.meta.get("example_value") for node in outputs if isinstance(node, torch.fx.Node)]
    memory = [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]
    return len(set(memory)) < len(memory)
