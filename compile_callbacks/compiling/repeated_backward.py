"""Backward passes that keep their graph, or are differentiated themselves: torch refuses both to compiled ones."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from compile_callbacks import _torch
from compile_callbacks.compiling.autocast import CurrentAutocast
from compile_callbacks.compiling.errors import CompileError
from compile_callbacks.links import see

_PASSES_WATCHED = 20
"""First backward passes of a graph, in which what it was computed from is kept for a second derivative in any case: who
asks for these mostly does so from the first step on. After that what nothing else needs is freed as without them."""

_BATCH_NORM = {torch.batch_norm, torch.nn.functional.batch_norm}
_COUNT = {"add_", operator.iadd}


def with_repeated_backward(
    compiled: Callable[..., Any], eager: torch.fx.GraphModule, *, target: str, on_recompute: Callable[[], None]
) -> Callable[..., Any]:
    """``compiled``, a graph's compiled function, with a backward pass that may run more than once.

    Under ``retain_graph=True`` the buffers that the backward pass computes in are put back as they were. Under
    ``create_graph=True`` it computes the graph once more, eagerly, and gives the gradients of that, which autograd can
    differentiate as often as it is asked to. All other backward passes are the compiled ones.

    Args:
        compiled: Called with the graph's inputs.
        eager: The graph.
        target: What it is of.
        on_recompute: Called before the graph is computed once more.
    """
    passes = _BackwardPasses(eager, target, on_recompute)

    def call(*inputs: Any) -> Any:
        outputs = compiled(*inputs)
        if torch.is_grad_enabled():
            passes.follow(inputs, outputs)
        return outputs

    return call


class _BackwardPasses:
    """Those of one graph."""

    def __init__(self, eager: torch.fx.GraphModule, target: str, on_recompute: Callable[[], None]) -> None:
        self._eager = eager
        self._target = target
        self._on_recompute = on_recompute
        self._autocast = CurrentAutocast()  # the one that the graph is compiled for
        self._recomputed = False
        self._passes = 0
        self._looked = False
        self._position: int | None = None  # of an output by which autograd's node is found
        self._outputs: dict[int, tuple[int, bool]] = {}  # the node's output: its position, and whether as a view of it
        self._activations: list[int] = []  # positions of inputs that have gradients and are no weights

    def follow(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """After a call: note down on autograd's node what was computed from."""
        if not self._looked:
            self._look(inputs, outputs)
        if self._position is None or (found := _made_by(outputs[self._position])) is None:
            return
        kept = list(inputs)
        if self._passes >= _PASSES_WATCHED and not self._recomputed:
            for i in self._activations:
                kept[i] = _no_longer_than_needed(kept[i])
        found[0].computed_from = kept

    def _look(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Find what is the same in every call."""
        self._looked = True
        earlier = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)} - {None}
        made = {i: found for i, output in enumerate(outputs) if (found := _made_by(output, earlier)) is not None}
        if not made:
            return  # nothing that it computes has a gradient
        self._position, (node, _, _) = next(iter(made.items()))
        self._outputs = {nr: (i, is_view) for i, (_, nr, is_view) in made.items()}
        tensors = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
        self._activations = [i for i, value in tensors.items() if value.requires_grad and not value.is_leaf]
        _torch.wrap_backward(node, self._wrap)

    def _wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in the place of a compiled backward pass."""

        def backward(node: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled():
                return self._recompute(node, _torch.gradients_given(arguments))
            if _torch.graph_is_kept():
                with _torch.donated_buffers_kept(node):
                    return compiled(node, *arguments)
            self._passes += 1
            vars(node).pop("computed_from", None)
            return compiled(node, *arguments)

        return backward

    def _recompute(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a call's inputs, with a graph of their own."""
        self._on_recompute()
        self._recomputed = True
        inputs = self._inputs_of(node)
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        edges = [None if function is None else GradientEdge(function, nr) for function, nr in node.next_functions]
        given = {nr: gradient for nr, gradient in enumerate(gradients) if gradient is not None}
        if given.keys() - self._outputs.keys():
            raise self._refusal("its graph changes an input that has a gradient")
        if len(tensors) != len(edges) or len(inputs) != len(node.needs_input_grad):
            raise self._refusal("inputs of its graph share their memory")
        for i in _torch.mutated_inputs(node):
            if not self._only_notes_down(i):
                raise self._refusal("its graph computes with an input, such as a buffer, and changes it")
            inputs[i] = inputs[i].detach().clone()  # it was noted down in the call
        random_numbers = _RandomNumbers(tensors)
        with self._autocast.again():
            outputs = self._eager(*inputs)
        if random_numbers.drawn():
            raise self._refusal("its graph draws random numbers, as dropout does")
        found = torch.autograd.grad(
            [self._output(outputs, nr) for nr in given],
            [edge for edge in edges if edge is not None],
            list(given.values()),
            create_graph=True,
            allow_unused=True,
        )
        of_edges = iter(found)
        of_tensors = iter([None if edge is None else next(of_edges) for edge in edges])
        return tuple(next(of_tensors) if isinstance(value, torch.Tensor) else None for value in inputs)

    def _output(self, outputs: Sequence[Any], nr: int) -> torch.Tensor:
        """What an output of autograd's node is among the outputs of the graph."""
        position, is_view = self._outputs[nr]
        output: torch.Tensor = outputs[position]
        return output if not is_view or output._base is None else output._base

    def _inputs_of(self, node: Any) -> list[Any]:
        inputs = [value() if isinstance(value, weakref.ref) else value for value in node.computed_from]
        if any(inputs[i] is None for i in self._activations):
            raise self._refusal(f"it was not in the first {_PASSES_WATCHED} steps, and an input of its graph is gone")
        return inputs

    def _only_notes_down(self, position: int) -> bool:
        """Whether an input that the graph changes, such as running statistics, has no part in its outputs."""
        users = [node for node in self._eager.graph.nodes if node.op == "placeholder"][position].users
        return all(user.target in _BATCH_NORM or (user.target in _COUNT and not user.users) for user in users)

    def _refusal(self, why: str) -> CompileError:
        message = (
            f"gradients of target {self._target!r} cannot be differentiated (create_graph=True), as {why}; leave it "
            "out of targets, or train eagerly (train_mode=None)"
        )
        return CompileError(see(message, "gradients-are-differentiated"))


def _made_by(output: Any, earlier: Collection[Any] = ()) -> tuple[Any, int, bool] | None:
    """Autograd's node of a compiled graph that made an output, which output of it, and whether this is a view of that.

    Args:
        output: The output.
        earlier: Nodes that made inputs: what passes through one of them was not computed here.
    """
    if not isinstance(output, torch.Tensor):
        return None
    node, nr, is_view = output.grad_fn, output.output_nr, False
    while node is not None and node not in earlier:
        if _torch.is_compiled_node(node):
            return node, nr, is_view
        if len(node.next_functions) != 1:
            return None
        (node, nr), is_view = node.next_functions[0], True
    return None


def _no_longer_than_needed(activation: torch.Tensor) -> Any:
    """A weak reference to what autograd keeps, or does not; it keeps a view as another view."""
    return activation if activation._is_view() else weakref.ref(activation)


class _RandomNumbers:
    """Whether random numbers are drawn from here on.

    Args:
        tensors: On the devices that may draw some.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._gpus = {tensor.device for tensor in tensors if tensor.is_cuda}
        self._before = self._states()

    def drawn(self) -> bool:
        """Whether some were; then all generators are as they were before."""
        drawn = any(not torch.equal(*both) for both in zip(self._before, self._states(), strict=True))
        if drawn:
            torch.set_rng_state(self._before[0])
            for gpu, state in zip(self._gpus, self._before[1:], strict=True):
                torch.cuda.set_rng_state(state, gpu)
        return drawn

    def _states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(gpu) for gpu in self._gpus)]
