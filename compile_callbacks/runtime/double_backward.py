"""Supports ``retain_graph=True`` and ``create_graph=True`` in compiled graphs, which ``torch.compile`` does not."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks.profiling.compile_events import CompileKey
from compile_callbacks.runtime.fallback import EagerFallback
from compile_callbacks.runtime.snapshot import RandomState

_INCREMENTS = {"add_", operator.iadd}

_version = operator.attrgetter("_version")


def with_repeated_backward(
    compiled: Callable[..., Any], eager: torch.fx.GraphModule, key: CompileKey, fallback: EagerFallback
) -> Callable[..., Any]:
    """Wrap a compiled graph so that its backward pass can run more than once.

    With ``retain_graph=True``, the wrapper restores the buffers that the backward pass overwrites. With
    ``create_graph=True``, it computes the graph a second time, eagerly, and returns the gradients of that computation,
    which autograd can differentiate. All other backward passes run compiled. The wrapper raises an error if the second
    computation would have other results than the first.
    """
    return _BackwardPasses(compiled, eager, key, fallback).call


class _BackwardPasses:
    """The backward passes of one graph."""

    def __init__(
        self, compiled: Callable[..., Any], eager: torch.fx.GraphModule, key: CompileKey, fallback: EagerFallback
    ) -> None:
        self._compiled = compiled
        self._eager = eager
        self._key = key
        self._fallback = fallback
        devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]
        self._examined = False
        self._versioned: list[bool] = []  # for each input: whether it has a version
        # The position of an output that leads to autograd's node, or None if the inputs need not be stored.
        self._position: int | None = None
        self._is_direct = False  # whether autograd's node is the grad_fn of that output
        # For each output of the node: the position among the graph's outputs, and whether it is a view.
        self._outputs: dict[int, tuple[int, bool]] = {}
        self._write_only: set[int] = set()  # positions of inputs that the graph writes but does not read
        self._problem: str | None = None

    def call(self, *inputs: Any) -> Any:
        """Call the graph, and store the inputs with their versions on autograd's node until the backward pass.

        Each call stores them, because any training step may differentiate its gradients.
        """
        outputs = self._compiled(*inputs)
        if not torch.is_grad_enabled():
            return outputs
        if not self._examined:
            self._examine(inputs, outputs)
        if self._position is not None:
            node = outputs[self._position].grad_fn
            if not self._is_direct:
                node, _, _ = _compiled_node(outputs[self._position]) or (None, 0, False)
            if node is not None:  # without a comprehension, because each call takes time for this
                node.computed_from = inputs, list(map(_version, itertools.compress(inputs, self._versioned)))
        return outputs

    def _examine(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Find autograd's node in the first call, and replace its backward pass. All calls have the same nodes."""
        self._examined = True
        # An inference tensor has no version.
        self._versioned = [isinstance(value, torch.Tensor) and not value.is_inference() for value in inputs]
        earlier = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)} - {None}
        found = {i: node for i, output in enumerate(outputs) if (node := _compiled_node(output, earlier)) is not None}
        if not found:
            return  # because no output has a gradient
        position, (node, _, is_view) = next(iter(found.items()))
        self._outputs = {nr: (i, is_view) for i, (_, nr, is_view) in found.items()}
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        mutated, statistics = _torch.autograd.mutated_inputs(node), _torch.graphs.written_statistics(self._eager)
        if len(tensors) != len(node.next_functions) or len(inputs) != len(node.needs_input_grad):
            self._problem = "inputs of its graph share their memory"
        elif not all(i in statistics or self._is_increment(i) for i in mutated):
            self._problem = "its graph reads and changes an input, such as a buffer"
        elif _torch.autograd.has_custom_backward(self._eager):
            self._problem = "its graph contains a torch.autograd.Function"
        else:
            self._write_only = set(mutated)
            self._position, self._is_direct = position, not is_view
        _torch.autograd.wrap_backward(node, self._wrap)

    def _wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that replaces a compiled backward pass."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def run_again(node: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled():
                return self._recompute(node, _torch.autograd.incoming_gradients(arguments))
            with _torch.autograd.donated_buffers_kept(node) as context:
                return compiled(context, *arguments)

        # Dynamo would compile these functions if a target calls autograd itself. Each step calls the second function,
        # and `disable` takes time in each call.
        @_torch.dynamo.skip
        def backward(node: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled() or _torch.autograd.graph_is_kept():
                return run_again(node, *arguments)
            vars(node).pop("computed_from", None)
            return compiled(node, *arguments)

        return backward

    def _recompute(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return differentiable gradients of the inputs of a call."""
        target, phase = self._key[:2]
        message = (
            f"gradients of target {target!r} are differentiated in the {phase} phase (create_graph=True), so the "
            f"target is computed a second time, eagerly; if most steps use it, {phase}_mode='eager' is faster"
        )
        self._fallback.warn("CC303", message)
        inputs = self._inputs_of(node)
        given = {nr: gradient for nr, gradient in enumerate(gradients) if gradient is not None}
        # Views, because an input may depend on another input, and gradients must stop at each input.
        views = {i: v.view_as(v) for i, v in enumerate(inputs) if isinstance(v, torch.Tensor) and v.requires_grad}
        copies = {i: inputs[i].detach().clone() for i in self._write_only}  # the first run has already updated them
        random_state = RandomState(inputs)
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            outputs = self._eager(*[views.get(i, copies.get(i, value)) for i, value in enumerate(inputs)])
        if random_state.drawn():
            random_state.restore()
            raise self._refusal("its graph draws random numbers, as dropout does")
        if not given:
            return (None,) * len(inputs)
        computed = [self._output(outputs, nr) for nr in given]
        found = torch.autograd.grad(
            computed, list(views.values()), list(given.values()), create_graph=True, allow_unused=True
        )
        of_views = dict(zip(views, found, strict=True))
        return tuple(of_views.get(i) for i in range(len(inputs)))

    def _output(self, outputs: Sequence[Any], nr: int) -> torch.Tensor:
        """Return the graph's output that corresponds to an output of autograd's node."""
        if nr not in self._outputs:
            raise self._refusal("its graph changes an input that has a gradient")
        position, is_view = self._outputs[nr]
        output: torch.Tensor = outputs[position]
        return output if not is_view or output._base is None else output._base

    def _inputs_of(self, node: Any) -> list[Any]:
        """Return the inputs of a call, or raise if they have changed since."""
        if self._problem:
            raise self._refusal(self._problem)
        if not hasattr(node, "computed_from"):
            _ = node.saved_tensors  # raises torch's error if an earlier backward pass has freed the graph
            raise self._refusal("the inputs of the call are not known")
        inputs, versions = node.computed_from
        versioned = itertools.compress(range(len(inputs)), self._versioned)
        changed = {i for i, before in zip(versioned, versions, strict=True) if inputs[i]._version != before}
        if changed - self._write_only:
            raise self._refusal("an input, a weight or a buffer was changed after the call")
        had_gradients = iter(function is not None for function, _ in node.next_functions)
        if any(value.requires_grad != next(had_gradients) for value in inputs if isinstance(value, torch.Tensor)):
            raise self._refusal("requires_grad of an input or a weight was changed after the call")
        return list(inputs)

    def _is_increment(self, position: int) -> bool:
        """Return whether the graph only increments an input, such as the number of batches that a batch norm counts."""
        placeholder = self._eager.graph.find_nodes(op="placeholder")[position]
        for user in placeholder.users:
            at = {i for i, argument in enumerate(user.args) if argument is placeholder}
            if user.target not in _INCREMENTS or at != {0} or user.users:
                return False
        return True

    def _refusal(self, reason: str) -> CompileError:
        message = (
            f"gradients of target {self._key.target!r} cannot be differentiated (create_graph=True), because {reason}; "
            "leave the target out of targets, or train eagerly (train_mode='eager')"
        )
        return CompileError(with_code("CC304", message))


def _compiled_node(output: Any, earlier: Collection[Any] = ()) -> tuple[Any, int, bool] | None:
    """Return autograd's node of the compiled graph that computed an output, unless an ``earlier`` node computed it.

    The result also contains the index of the node's output, and whether ``output`` is a view of the node's output.
    """
    if not isinstance(output, torch.Tensor):
        return None
    node, nr, is_view = output.grad_fn, output.output_nr, False
    while node is not None and node not in earlier:
        if _torch.autograd.is_compiled_node(node):
            return node, nr, is_view
        if len(node.next_functions) != 1:
            return None
        (node, nr), is_view = node.next_functions[0], True
    return None
