"""Supports ``retain_graph=True`` in compiled graphs, which ``torch.compile`` does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks.profiling.compile_events import CompileKey


def allow_repeated_backward(inputs: Sequence[Any], outputs: Sequence[Any], key: CompileKey) -> None:
    """Let the backward pass of a compiled training graph run more than once (``retain_graph=True``).

    All calls of the graph share the function of the backward pass, so one call's inputs and outputs are enough.

    torch cannot differentiate the backward pass of a compiled graph (``create_graph=True``). Its error gets a note with
    the name of the target.
    """
    earlier = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)} - {None}
    nodes = (_compiled_node(output, earlier) for output in outputs)
    if (node := next(filter(None, nodes), None)) is not None:
        _torch.autograd.wrap_backward(node, lambda backward: _repeatable(backward, key))


def _repeatable(compiled: Callable[..., Any], key: CompileKey) -> Callable[..., Any]:
    """Return the function that replaces a compiled backward pass."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def keep_graph(node: Any, *arguments: Any) -> Any:
        with _torch.autograd.donated_buffers_kept(node) as context:
            gradients = compiled(context, *arguments)
        if torch.is_grad_enabled():
            note = (
                f"A step differentiates the gradients of target {key.target!r} (create_graph=True). Run the phase "
                f"eagerly ({key.phase}_mode='eager'), or compile other modules (targets=[...])"
            )
            _torch.autograd.add_note_to_double_backward(gradients, with_code("CC304", note))
        return gradients

    # Dynamo would compile these functions if a target calls autograd itself. Each step calls the second function, and
    # `disable` takes time in each call.
    @_torch.dynamo.skip
    def backward(node: Any, *arguments: Any) -> Any:
        if _torch.autograd.graph_is_kept():  # also with create_graph=True
            return keep_graph(node, *arguments)
        return compiled(node, *arguments)

    return backward


def _compiled_node(output: Any, earlier: Collection[Any]) -> Any:
    """Return autograd's node of the compiled graph that computed an output, unless an ``earlier`` node computed it."""
    node = output.grad_fn if isinstance(output, torch.Tensor) else None
    while node is not None and node not in earlier:
        if _torch.autograd.is_compiled_node(node):
            return node
        if len(node.next_functions) != 1:
            return None
        node = node.next_functions[0][0]  # the output is a view of the node's output
    return None
