"""Backward passes that keep their graph or are differentiated themselves; torch refuses both for compiled graphs."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks.runtime.snapshot import RandomState, version

_STATISTICS = {torch.batch_norm: (3, 4), torch.nn.functional.batch_norm: (1, 2)}
"""Positions of the arguments that a batch norm changes, and computes nothing with while training."""

_COUNTS = {"add_", operator.iadd}


def with_repeated_backward(
    compiled: Callable[..., Any], eager: torch.fx.GraphModule, *, target: str, on_recompute: Callable[[], None]
) -> Callable[..., Any]:
    """``compiled``, a graph's compiled function, with a backward pass that may run more than once.

    Under ``retain_graph=True`` the buffers that the backward pass computes in are put back as they were. Under
    ``create_graph=True`` it computes the graph once more, eagerly, and gives the gradients of that, which autograd can
    differentiate as often as it is asked to. All other backward passes are the compiled ones. What would be computed
    otherwise the second time is refused.

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
        self._autocast = _CurrentAutocast()  # the one that the graph is compiled for
        self._looked = False
        self._tensors: tuple[int, ...] = ()  # positions of the inputs that have a version
        self._position: int | None = None  # of an output by which autograd's node is found
        self._direct = False  # whether that output's own node is it
        self._outputs: dict[int, tuple[int, bool]] = {}  # the node's output: its position, and whether as a view of it
        self._noted_down: set[int] = set()  # positions of inputs that the graph changes, without computing with them
        self._why_not: str | None = None

    def follow(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """After a call: keep its inputs and their versions on autograd's node, until the backward pass.

        Every call does so, because a training step may differentiate its gradients from any step on.
        """
        if not self._looked:
            self._look(inputs, outputs)
        if self._position is None or self._why_not:
            return
        node = outputs[self._position].grad_fn
        if not self._direct:
            node, _, _ = _made_by(outputs[self._position]) or (None, 0, False)
        if node is not None:
            node.computed_from = inputs, [inputs[i]._version for i in self._tensors]

    def _look(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Find what is the same in every call."""
        self._looked = True
        self._tensors = tuple(i for i, value in enumerate(inputs) if version(value) is not None)
        earlier = {value.grad_fn for value in inputs if isinstance(value, torch.Tensor)} - {None}
        made = {i: found for i, output in enumerate(outputs) if (found := _made_by(output, earlier)) is not None}
        if not made:
            return  # nothing that it computes has a gradient
        self._position, (node, _, is_view) = next(iter(made.items()))
        self._direct = not is_view
        self._outputs = {nr: (i, is_view) for i, (_, nr, is_view) in made.items()}
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        if len(tensors) != len(node.next_functions) or len(inputs) != len(node.needs_input_grad):
            self._why_not = "inputs of its graph share their memory"
        elif not all(self._only_notes_down(i) for i in _torch.autograd.mutated_inputs(node)):
            self._why_not = "its graph changes an input, such as a buffer, that it computes with"
        elif _torch.autograd.has_backward_of_its_own(self._eager):
            self._why_not = "there is a torch.autograd.Function in it"
        else:
            self._noted_down = set(_torch.autograd.mutated_inputs(node))
        _torch.autograd.wrap_backward(node, self._wrap)

    def _wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """What runs in the place of a compiled backward pass."""

        def backward(node: Any, *arguments: Any) -> Any:
            if torch.is_grad_enabled():
                return self._recompute(node, _torch.autograd.gradients_given(arguments))
            if _torch.autograd.graph_is_kept():
                with _torch.autograd.donated_buffers_kept(node) as context:
                    return compiled(context, *arguments)
            vars(node).pop("computed_from", None)
            return compiled(node, *arguments)

        # Else Dynamo would compile this, where a target asks for gradients itself.
        disabled: Callable[..., Any] = torch.compiler.disable(backward)
        return disabled

    def _recompute(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of a call's inputs, with a graph of their own."""
        self._on_recompute()
        inputs = self._inputs_of(node)
        given = {nr: gradient for nr, gradient in enumerate(gradients) if gradient is not None}
        # Gradients are those of these views, and not of what an input was computed from, which may be another input.
        views = {i: value.view_as(value) for i, value in enumerate(inputs) if _has_gradient(value)}
        copies = {i: inputs[i].detach().clone() for i in self._noted_down}  # it is noted down already
        random_state = RandomState(inputs)
        with self._autocast.again():
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
        """What an output of autograd's node is among the outputs of the graph."""
        if nr not in self._outputs:
            raise self._refusal("its graph changes an input that has a gradient")
        position, is_view = self._outputs[nr]
        output: torch.Tensor = outputs[position]
        return output if not is_view or output._base is None else output._base

    def _inputs_of(self, node: Any) -> list[Any]:
        """The inputs of a call, if they have not changed since."""
        if self._why_not:
            raise self._refusal(self._why_not)
        if not hasattr(node, "computed_from"):
            _ = node.saved_tensors  # torch's own error: an earlier backward pass has freed the graph
            raise self._refusal("the inputs of the call are not known")
        inputs, versions = node.computed_from
        changed = {i for i, before in zip(self._tensors, versions, strict=True) if inputs[i]._version != before}
        if changed - self._noted_down:
            raise self._refusal("an input, a weight or a buffer was changed after the call")
        had_gradients = iter(function is not None for function, _ in node.next_functions)
        if any(value.requires_grad != next(had_gradients) for value in inputs if isinstance(value, torch.Tensor)):
            raise self._refusal("requires_grad of an input or a weight was changed after the call")
        return list(inputs)

    def _only_notes_down(self, position: int) -> bool:
        """Whether an input that the graph changes, such as running statistics, has no part in its outputs."""
        placeholder = [node for node in self._eager.graph.nodes if node.op == "placeholder"][position]
        for user in placeholder.users:
            at = {i for i, argument in enumerate(user.args) if argument is placeholder}
            counts = user.target in _COUNTS and at == {0} and not user.users
            if not counts and not (at and at <= set(_STATISTICS.get(user.target, ()))):
                return False
        return True

    def _refusal(self, why: str) -> CompileError:
        message = (
            f"gradients of target {self._target!r} cannot be differentiated (create_graph=True), as {why}; leave it "
            "out of targets, or train eagerly (train_mode=None)"
        )
        return CompileError(with_code("CC304", message))


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


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
        if _torch.autograd.is_compiled_node(node):
            return node, nr, is_view
        if len(node.next_functions) != 1:
            return None
        (node, nr), is_view = node.next_functions[0], True
    return None


class _CurrentAutocast:
    """The autocast that is active when this object is made."""

    def __init__(self) -> None:
        devices = ("cpu", "cuda")
        self._states = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """A context with the same autocast."""
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self._states:
                if enabled != torch.is_autocast_enabled(device) or enabled:
                    stack.enter_context(torch.autocast(device, dtype, enabled=enabled))
            yield
