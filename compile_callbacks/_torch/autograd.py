"""Wraps autograd and AOTAutograd: the backward passes of compiled graphs, and hooks on saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
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


def is_compiled_node(node: Any) -> bool:
    """Return whether a node of autograd's graph is the backward pass of a compiled graph."""
    return hasattr(getattr(node, "_forward_cls", None), "num_symints_saved_for_bw")


def wrap_backward(node: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the backward pass of the compiled graph that a node belongs to."""
    node._forward_cls.backward = staticmethod(wrap(node._forward_cls.backward))


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
"""Returns whether the running backward pass keeps its graph (``retain_graph=True``)."""


def add_note_to_double_backward(gradients: Sequence[Any], note: str) -> None:
    """Add a note to the error that torch raises if someone differentiates the gradients of a compiled graph."""
    nodes: list[Any] = [value.grad_fn for value in gradients if isinstance(value, torch.Tensor)]
    classes: set[Any] = {node._forward_cls for node in nodes if hasattr(node, "_forward_cls")}
    for cls in classes:  # torch makes a class in each backward pass

        def backward(*arguments: Any, raising: Callable[..., Any] = cls.backward) -> Any:
            try:
                return raising(*arguments)
            except RuntimeError as error:
                error.add_note(note)
                raise

        cls.backward = staticmethod(backward)


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


class _UnpackedOnce:
    """A node of autograd with unpacked saved tensors, because some users' hooks can unpack a tensor only once."""

    def __init__(self, node: Any, saved: Sequence[torch.Tensor]) -> None:
        self._node = node
        self.saved_tensors = saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)


@contextlib.contextmanager
def donated_buffers_kept(node: Any) -> Iterator[Any]:
    """Allow ``retain_graph=True`` in the backward pass of a compiled graph. Yield the node to call.

    Workaround (until AOTAutograd supports ``retain_graph=True`` with donated buffers): AOTAutograd lets the backward
    pass overwrite saved tensors, and raises an error if the graph is kept. This function restores the tensors
    afterwards.
    """
    metadata, unpacked = node._forward_cls.metadata, node.saved_tensors
    saved, donated = [*unpacked, *node._tensors_no_vc_check], metadata.bw_donated_idxs
    # The indices include the symbolic integers, which are the first arguments of the backward pass.
    buffers = [saved[index - node._forward_cls.num_symints_saved_for_bw] for index in donated or []]
    copies = [buffer.detach().clone() for buffer in buffers]
    metadata.bw_donated_idxs = []
    try:
        yield _UnpackedOnce(node, unpacked)
    finally:
        metadata.bw_donated_idxs = donated
        with torch.no_grad(), preserve_versions(tuple(buffers)):
            for buffer, copied in zip(buffers, copies, strict=True):
                buffer.copy_(copied)
