"""`ObservedCalls`: records facts about a target's eager calls. `ShapePolicy`: decides which calls may compile."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks._utils.signatures import inputs_of, signature
from compile_callbacks.calls.python_state import ChangingIntegers, ChangingState
from compile_callbacks.graphs.failures import NewShapes

RETURNING_SHAPE_CALLS = 8
"""With ``new_shapes="eager"``, the number of calls with one shape after which the shape is compiled.

torch's default ``recompile_limit`` is the same number.
"""

SPECIALIZED = (0, 1)
"""Sizes for which torch compiles a separate graph, even if the dimension is dynamic."""


class ObservedCalls:
    """Records facts about a target's eager calls in one phase.

    The facts are the dimensions and integers of the inputs that vary, the Python state and the integer attributes that
    change, and whether the gradients are differentiated.

    `record` gets the inputs of eager calls and of calls that compile. A dimension varies if it had two sizes other than
    0 and 1. Within `marked`, torch treats varying dimensions and integers as dynamic, and all others as static. The
    first graph then accepts all recorded sizes, and one recompile is enough for dimensions that vary later.
    """

    def __init__(self, running: list[ObservedCalls]) -> None:
        self.gradients_differentiated = False  # whether a backward pass through an eager call had create_graph=True
        self.keeps_graph = False  # whether a backward pass through an eager call had retain_graph=True
        self._running = running  # the records of the eager calls that are running
        self.changing_state = ChangingState()
        self.changing_integers = ChangingIntegers()
        self._changing: dict[str, ChangingState | ChangingIntegers] = {
            CHANGING_STATE: self.changing_state,
            CHANGING_INTEGERS: self.changing_integers,
        }
        self._sizes: dict[str, list[int | None]] = {}  # by input; None if the size varies; an integer has one entry

    def record(self, args: Any, kwargs: Any) -> None:
        """Record the sizes of a call's inputs. This takes about 1 µs per input."""
        for name, value in inputs_of(args, kwargs):
            is_tensor = isinstance(value, torch.Tensor)
            sizes: list[int | None] = [*value.shape] if isinstance(value, torch.Tensor) else [value]
            known = self._sizes.setdefault(_key(name, value), sizes)
            for i, (before, now) in enumerate(zip(known, sizes, strict=True)):
                if before is None or before == now or (is_tensor and now in SPECIALIZED):
                    continue
                known[i] = now if is_tensor and before in SPECIALIZED else None

    def recording(self, call: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Wrap a target's eager call to `record` its inputs, and to observe Python state and the backward pass."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.record(args, kwargs)
            self.changing_state.call_begins(module)
            self.changing_integers.call_begins(module)
            self._running.append(self)
            try:
                result = call(*args, **kwargs)
            finally:
                self._running.pop()
            self.changing_state.call_ended(module)
            if _torch.dynamo.is_transformed():
                return result  # torch.func.grad enables grad mode in its backward pass, but needs no second one
            for _, output in inputs_of((result,), {}):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.grad_fn.register_prehook(self._backward_begins)
            return result

        return recorded

    def _backward_begins(self, gradients: Any) -> None:
        # Autograd enables grad mode in a backward pass only with create_graph=True. A running target that contains this
        # one differentiates the gradients itself.
        for record in (self, *self._running):
            record.gradients_differentiated |= torch.is_grad_enabled()
            record.keeps_graph |= _torch.autograd.graph_is_kept()

    @contextlib.contextmanager
    def marked(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Mark the inputs that vary as dynamic in a ``with`` block in which torch compiles."""
        varying = self._varying()
        integers = []
        with contextlib.ExitStack() as undo:
            for name, value in inputs_of(args, kwargs) if varying else ():
                dimensions = varying.get(_key(name, value))
                if dimensions is None:
                    continue
                if isinstance(value, torch.Tensor):
                    undo.callback(_torch.dynamo.mark_dimensions(value, dimensions))
                else:
                    integers.append(name)
            if integers:
                undo.enter_context(_torch.dynamo.numbers_as_dynamic(integers))
            yield

    def _varying(self) -> dict[str, list[int]]:
        """Return the dimensions that vary, by input. A varying integer has the entry ``[0]``."""
        varying = {name: [i for i, size in enumerate(sizes) if size is None] for name, sizes in self._sizes.items()}
        return {name: dimensions for name, dimensions in varying.items() if dimensions}

    def state(self) -> dict[str, Any]:
        """Return the observations as JSON-ready data."""
        state: dict[str, Any] = {**self._varying()}
        for key, changing in self._changing.items():
            if changing.names:
                state[key] = sorted(changing.names)
        if self.gradients_differentiated:
            state[DIFFERENTIATED] = True
        return state

    def restore(self, state: object) -> None:
        """Continue from the `state` of an earlier run. Ignore data of another form."""
        for key, dimensions in state.items() if isinstance(state, Mapping) else ():
            if key in self._changing and isinstance(dimensions, list):
                self._changing[key].names.update(name for name in dimensions if isinstance(name, str))
                continue
            if key == DIFFERENTIATED:
                self.gradients_differentiated = True
                continue
            rank = key.rpartition(":")[2] if isinstance(key, str) else ""
            count = 1 if rank == "int" else int(rank) if rank.isdecimal() and len(rank) < 3 else 0
            if isinstance(dimensions, list) and all(type(i) is int and 0 <= i < count for i in dimensions):
                known = self._sizes.setdefault(key, [0] * count)
                for i in dimensions:
                    known[i] = None


CHANGING_STATE, CHANGING_INTEGERS = "changing state", "changing integers"
"""The keys of the names in `ObservedCalls.state`. The keys of inputs contain a colon."""

DIFFERENTIATED = "gradients are differentiated"
"""The key of `ObservedCalls.gradients_differentiated` in `ObservedCalls.state`."""


class CallRecords:
    """The `ObservedCalls` of each target and phase of a session."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Phase], ObservedCalls] = {}
        self._running: list[ObservedCalls] = []

    def of(self, target: str, phase: Phase) -> ObservedCalls:
        """Return the record of a target in a phase."""
        return self._records.setdefault((target, phase), ObservedCalls(self._running))

    def state(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the inputs that vary and the state that changes, by phase and target, as JSON-ready data."""
        states: dict[str, dict[str, dict[str, Any]]] = {}
        for (target, phase), observed in self._records.items():
            if state := observed.state():
                states.setdefault(phase, {})[target] = state
        return states

    def restore(self, state: object) -> None:
        """Continue from the `state` of an earlier run. Ignore data of another form."""
        for phase in PHASES:
            of_phase = state.get(phase) if isinstance(state, Mapping) else None
            for target, varying in of_phase.items() if isinstance(of_phase, Mapping) else ():
                if isinstance(target, str):
                    self.of(target, phase).restore(varying)


class ShapePolicy:
    """Decides whether a call may compile. The decision depends on the shapes of earlier calls."""

    def __init__(self, new_shapes: NewShapes) -> None:
        self._new_shapes = new_shapes
        self._known: set[Any] = set()
        self._calls: Counter[Any] = Counter()

    def allow(self, args: Any, kwargs: Any) -> None:
        """Allow calls with these shapes to compile."""
        self._known.add(signature(args, kwargs))

    def stance(self, args: Any, kwargs: Any) -> str | None:
        """Return the stance for a call, or ``None`` if the call may compile. See ``torch.compiler.set_stance``.

        With the stance, torch still runs a compiled graph that accepts the shapes, such as a dynamic graph.
        """
        call = signature(args, kwargs)
        if call in self._known:
            return None
        self._calls[call] += 1
        returning = self._new_shapes == "eager" and self._calls[call] >= RETURNING_SHAPE_CALLS
        # An activation checkpoint must not recompute with compiled code if its forward pass was eager.
        if not self._known or (returning and not _torch.autograd.saves_through_hooks()):
            self._known.add(call)
            return None
        return "eager_on_recompile" if self._new_shapes == "eager" else "fail_on_recompile"


def _key(name: str, value: torch.Tensor | int) -> str:
    """Return an input's name with its number of dimensions, which separates tensors of different ranks."""
    return f"{name}:{value.dim()}" if isinstance(value, torch.Tensor) else f"{name}:int"
