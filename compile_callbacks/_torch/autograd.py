"""Wraps autograd and AOTAutograd: the backward passes of compiled graphs, and hooks on saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch

from compile_callbacks._torch.graphs import add_node
from compile_callbacks._torch.ports import optional


@optional("versions", lambda: contextlib.nullcontext)
def preserve_versions() -> Callable[[Any], contextlib.AbstractContextManager[Any]]:
    """Return a class of context managers in which writes do not raise the version counters of tensors.

    Each call of a graph uses the class, which needs no frame of ours.
    """
    return torch.autograd.grad_mode._unsafe_preserve_version_counter


def outside_activation_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Hide the saved tensors of a ``with`` block from an activation checkpoint around it.

    A checkpoint counts the tensors that its hooks get, and autograd only calls the innermost hooks.
    """
    # Setting hooks raises an error if the user has disabled them, so set hooks only within other hooks.
    return torch.autograd.graph.saved_tensors_hooks(_same, _same) if saves_through_hooks() else contextlib.nullcontext()


@optional("backward", lambda: False)
def in_backward() -> bool:
    """Return whether the current thread runs a backward pass, in which activation checkpoints call modules again.

    Workaround (until torch has a public function for this): the function calls a private function of torch.
    """
    return torch._C._current_graph_task_id() != -1


@optional("backward", lambda: True)
def saves_through_hooks() -> bool:
    """Return whether hooks handle the tensors that are saved for backward, as in an activation checkpoint.

    Workaround (until torch has a public function for this): the function calls a private function of torch.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
    count: int = torch._guards.TracingContext.get().fw_metadata.num_forward  # type: ignore[union-attr]
    assert 0 < count <= len(results), "torch counts the outputs of a forward graph in another way"
    for i in range(count, len(results)):
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


@optional("backward", lambda: True)
def graph_is_kept() -> bool:
    """Return whether the running backward pass keeps its graph (``retain_graph=True``).

    Workaround (until torch has a public function for this): the function calls a private function of torch.
    """
    return torch._C._autograd._get_current_graph_task_keep_graph()


@optional("backward")
def overwrite_no_saved_tensors() -> None:
    """Let the backward pass of the graph that AOTAutograd compiles run more than once (``retain_graph=True``).

    Workaround (until AOTAutograd supports ``retain_graph=True`` with donated buffers): by default, the backward pass
    overwrites saved tensors (``bw_donated_idxs``), and raises an error if the graph is kept. While it compiles,
    ``torch._functorch.config.donated_buffer`` must be ``False``, so that it overwrites none. It still raises the error
    if the setting is ``True`` when it runs, unless the list is empty instead of missing (2.11 to 2.15).
    """
    torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs = []  # type: ignore[union-attr]
