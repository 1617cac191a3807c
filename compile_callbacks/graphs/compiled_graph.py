"""`CompiledGraph` and `EagerGraph`: what Dynamo's code calls for one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.repeated_backward import allow_repeated_backward
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.profiling.compile_events import CompileKey
from compile_callbacks.profiling.executions import Executions


@dataclass(eq=False, slots=True)  # torch copies the attributes of an object without slots to a function that it keeps
class EagerGraph:
    """Calls one captured graph eagerly, because it was not compiled, or because its compiled code is not used.

    If the compiler was ``out_of_memory``, this is recorded only after the eager run. If the eager run is out of memory
    too, it raises the user's own error, and the user may skip the batch. The next call then compiles again.
    """

    graph: torch.fx.GraphModule
    executions: Executions
    fallback: EagerFallback
    out_of_memory: Exception | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        self.executions.eager_calls += 1
        try:
            with _torch.modes.restored_after_error():  # takes 4 µs
                outputs = self.graph.forward(*inputs)
        except torch.OutOfMemoryError:
            self.fallback.call.compiles_again |= self.out_of_memory is not None
            raise
        if self.out_of_memory is not None:
            self.fallback.compiler_failed(self.out_of_memory)
            self.out_of_memory = None
        return outputs


@dataclass(eq=False, slots=True)
class CompiledGraph:
    """Calls one compiled graph.

    The first call compares the graph with eager, and decides what later calls run. A later call adds only this frame.

    Like eager batch norm, a call does not raise the versions of running statistics. Eager batch norm saves them for the
    backward pass. If a compiled call raised their versions, the backward pass of an earlier eager call in the same step
    would fail: "modified by an inplace operation". This takes 0.2 µs for each buffer.

    Attributes:
        compiled: The compiled code.
        verification: Compares the graph with eager in the first call, or ``None``.
        statistics: The positions of the inputs that are running statistics.
        differentiable: The target, if the backward pass may keep its graph.
        executions: Counts the calls.
        run: The compiled code after the first call, unless the captured graph runs.
        eager: The captured graph, if it runs after the first call.
    """

    compiled: Callable[..., Any]
    verification: Verification | None
    statistics: Sequence[int]
    differentiable: CompileKey | None
    executions: Executions
    run: Callable[..., Any] | None = None
    eager: EagerGraph | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if (run := self.run) is None:
            return self._first_call(inputs)
        self.executions.graphs += 1
        if not self.statistics:
            return run(*inputs)
        with _torch.autograd.preserve_versions(tuple([inputs[i] for i in self.statistics])):
            return run(*inputs)

    def _first_call(self, inputs: Sequence[Any]) -> Any:
        if self.eager is not None:
            return self.eager(*inputs)
        verification, self.verification = self.verification, None  # frees the captured graph after the call
        with _torch.autograd.preserve_versions(tuple([inputs[i] for i in self.statistics])):
            outputs = self.compiled(*inputs) if verification is None else verification.call(inputs)
        if verification is not None and verification.rejected:
            self.eager = EagerGraph(verification.eager, self.executions, verification.fallback)
            self.executions.eager_calls += 1
            return outputs
        self.executions.graphs += 1
        self.run = self.compiled
        if self.differentiable is not None and torch.is_grad_enabled():
            allow_repeated_backward(inputs, outputs, self.differentiable)
        return outputs
