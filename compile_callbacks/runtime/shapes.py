"""`ObservedShapes`: which dimensions of a target's inputs vary. `CompiledTarget` marks them before torch compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks._utils.signatures import inputs_of

SPECIALIZED = (0, 1)
"""Sizes for which torch compiles a separate graph, whether the dimension is dynamic or not."""


class ObservedShapes:
    """Which dimensions and which integers of a target's inputs vary in one phase, in its eager calls.

    `record` sees the inputs of eager calls, and of calls that compile. A dimension varies if it had two sizes other
    than 0 and 1. Under `marked`, torch treats the dimensions and integers that vary as dynamic, and all others as
    constant: the first graph fits all sizes that were seen, and one recompile is enough for dimensions that vary later.

    Attributes:
        gradients_differentiated: Whether a backward pass through an eager call had ``create_graph=True``.
    """

    def __init__(self) -> None:
        self.gradients_differentiated = False
        self._sizes: dict[str, list[int | None]] = {}  # by input; None: it varies. An integer has one entry.

    def record(self, args: Any, kwargs: Any) -> None:
        """Record the sizes of a call's inputs; about 1 µs for each input."""
        for name, value in inputs_of(args, kwargs):
            is_tensor = isinstance(value, torch.Tensor)
            sizes: list[int | None] = [*value.shape] if isinstance(value, torch.Tensor) else [value]
            known = self._sizes.setdefault(_key(name, value), sizes)
            for i, (before, now) in enumerate(zip(known, sizes, strict=True)):
                if before is None or before == now or (is_tensor and now in SPECIALIZED):
                    continue
                known[i] = now if is_tensor and before in SPECIALIZED else None

    def recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a target's eager call with a `record` before it, whose backward pass is observed too."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.record(args, kwargs)
            result = call(*args, **kwargs)
            for _, output in inputs_of((result,), {}):
                if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                    output.grad_fn.register_prehook(self._backward_begins)
            return result

        return recorded

    def _backward_begins(self, gradients: Any) -> None:
        # Autograd enables grad mode in a backward pass with create_graph=True only.
        self.gradients_differentiated |= torch.is_grad_enabled()

    @contextlib.contextmanager
    def marked(self, args: Any, kwargs: Any) -> Iterator[None]:
        """A context for a call in which torch compiles: the inputs that vary are dynamic."""
        varying = self.varying()
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

    def varying(self) -> dict[str, list[int]]:
        """By input, the dimensions that vary; JSON-ready. An integer that varies has the entry ``[0]``."""
        found = {name: [i for i, size in enumerate(sizes) if size is None] for name, sizes in self._sizes.items()}
        return {name: dimensions for name, dimensions in found.items() if dimensions}

    def restore(self, varying: object) -> None:
        """Continue from the `varying` of an earlier run. What has another form is ignored."""
        for key, dimensions in varying.items() if isinstance(varying, Mapping) else ():
            rank = key.rpartition(":")[2] if isinstance(key, str) else ""
            count = 1 if rank == "int" else int(rank) if rank.isdecimal() and len(rank) < 3 else 0
            if isinstance(dimensions, list) and all(type(i) is int and 0 <= i < count for i in dimensions):
                known = self._sizes.setdefault(key, [0] * count)
                for i in dimensions:
                    known[i] = None


class ShapeRecords:
    """The `ObservedShapes` of each target and phase of a session."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, Phase], ObservedShapes] = {}

    def of(self, target: str, phase: Phase) -> ObservedShapes:
        """The record of a target in a phase."""
        return self._records.setdefault((target, phase), ObservedShapes())

    def state(self) -> dict[str, dict[str, dict[str, list[int]]]]:
        """By phase and target, what varies; JSON-ready."""
        found: dict[str, dict[str, dict[str, list[int]]]] = {}
        for (target, phase), observed in self._records.items():
            if varying := observed.varying():
                found.setdefault(phase, {})[target] = varying
        return found

    def restore(self, state: object) -> None:
        """Continue from the `state` of an earlier run. What has another form is ignored."""
        for phase in PHASES:
            of_phase = state.get(phase) if isinstance(state, Mapping) else None
            for target, varying in of_phase.items() if isinstance(of_phase, Mapping) else ():
                if isinstance(target, str):
                    self.of(target, phase).restore(varying)


def _key(name: str, value: torch.Tensor | int) -> str:
    """An input's name with its rank: a tensor of another rank is another input."""
    return f"{name}:{value.dim()}" if isinstance(value, torch.Tensor) else f"{name}:int"
