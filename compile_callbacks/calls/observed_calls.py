"""`ObservedCalls`: records facts about a target's eager calls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks._utils.signatures import inputs_of
from compile_callbacks.calls.input_sizes import InputSizes, input_key

EAGER_CALLS = 2
"""The number of eager calls of a target in which `ChangingIntegers` reads the integers."""


class _Running(threading.local):
    """The records of the eager calls that run in a thread."""

    def __init__(self) -> None:
        self.calls: list[ObservedCalls] = []


class ObservedCalls:
    """Records facts about a target's eager calls in one phase.

    The facts are the dimensions and integers of the inputs that vary, the integer attributes that change, and whether
    the gradients are differentiated.

    Within `marked`, torch treats the dimensions and integers that vary as dynamic, and all others as static. The first
    graph then accepts the sizes of all eager calls that occur often.
    """

    def __init__(self, running: _Running) -> None:
        self.gradients_differentiated = False  # whether a backward pass through an eager call had create_graph=True
        self.keeps_graph = False  # whether a backward pass through an eager call had retain_graph=True
        self._running = running
        self.changing_integers = ChangingIntegers()
        self.sizes = InputSizes()

    def recording(self, call: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Wrap a target's eager call to observe its inputs, its integers and the backward pass."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.sizes.record_eager(args, kwargs)
            self.changing_integers.call_begins(module)
            self._running.calls.append(self)
            try:
                result = call(*args, **kwargs)
            finally:
                self._running.calls.pop()
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
        for record in (self, *self._running.calls):
            record.gradients_differentiated |= torch.is_grad_enabled()
            record.keeps_graph |= _torch.autograd.graph_is_kept()

    @contextlib.contextmanager
    def marked(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Mark the inputs that vary as dynamic in a ``with`` block in which torch compiles."""
        varying = self.sizes.varying()
        integers = []
        with contextlib.ExitStack() as undo:
            for name, value in inputs_of(args, kwargs) if varying else ():
                dimensions = varying.get(input_key(name, value))
                if dimensions is None:
                    continue
                if isinstance(value, torch.Tensor):
                    undo.callback(_torch.dynamo.mark_dimensions(value, dimensions))
                else:
                    integers.append(name)
            if integers:
                undo.enter_context(_torch.dynamo.numbers_as_dynamic(integers))
            yield

    def state(self) -> dict[str, Any]:
        """Return the observations as JSON-ready data."""
        state: dict[str, Any] = {**self.sizes.varying()}
        if self.changing_integers.names:
            state[CHANGING_INTEGERS] = sorted(self.changing_integers.names)
        flags = {DIFFERENTIATED: self.gradients_differentiated, KEPT: self.keeps_graph}
        return state | {key: True for key, is_set in flags.items() if is_set}

    def restore(self, state: object) -> None:
        """Continue from the `state` of an earlier run. Ignore data of another form."""
        for key, dimensions in state.items() if isinstance(state, Mapping) else ():
            if key == CHANGING_INTEGERS and isinstance(dimensions, list):
                self.changing_integers.names.update(name for name in dimensions if isinstance(name, str))
            else:
                self.gradients_differentiated |= key == DIFFERENTIATED
                self.keeps_graph |= key == KEPT
                self.sizes.restore(key, dimensions)


CHANGING_INTEGERS = "changing integers"
"""The key of the names in `ObservedCalls.state`. The keys of inputs contain a colon."""

DIFFERENTIATED, KEPT = "gradients are differentiated", "graphs are kept"
"""The keys of `ObservedCalls.gradients_differentiated` and `ObservedCalls.keeps_graph` in `ObservedCalls.state`."""


class ChangingIntegers:
    """The integer attributes of a target's modules that change in the first eager calls, such as a count of the calls.

    torch compiles a graph for each value of such an attribute, unless ``allow_unspec_int_on_nn_module`` is set.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()  # empty before the second call of the module
        self._module_id: int | None = None  # of the first module, because repeated blocks have other integers
        self._seen: list[dict[str, int]] = []  # before each call

    def call_begins(self, module: nn.Module) -> None:
        """Read the integers before an eager call, unless enough calls were observed."""
        if len(self._seen) == EAGER_CALLS or self._module_id not in (None, id(module)):
            return
        self._module_id = id(module)
        self._seen.append(
            {
                f"{path}.{name}".lstrip("."): value
                for path, submodule in module.named_modules()
                for name, value in vars(submodule).items()
                if type(value) is int
            }
        )
        first, last = self._seen[0], self._seen[-1]
        self.names |= {name for name in first.keys() & last.keys() if first[name] != last[name]}


class CallRecords:
    """The `ObservedCalls` of each target and phase of a session."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Phase], ObservedCalls] = {}
        self._running = _Running()

    def of(self, target: str, phase: Phase) -> ObservedCalls:
        """Return the record of a target in a phase."""
        return self._records.setdefault((target, phase), ObservedCalls(self._running))

    def state(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the inputs that vary and the integers that change, by phase and target, as JSON-ready data."""
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
