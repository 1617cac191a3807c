"""`CompiledGraph` and `EagerGraph`: what Dynamo's code calls for one captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.repeated_backward import allow_repeated_backward
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.profiling.compile_events import CompileKey
from compile_callbacks.profiling.executions import Executions


class CompiledGraph:
    """Calls one compiled graph.

    The first call compares the graph with eager, and decides which of them the later calls run. A later call adds only
    this frame, because each frame takes time in each call. The object has slots, because torch copies the attributes of
    other objects into a function that it keeps.

    Like eager batch norm, a call does not raise the versions of running statistics. Eager batch norm saves them for the
    backward pass. If a compiled call raised their versions, the backward pass of an earlier eager call in the same step
    would fail: "modified by an inplace operation". This takes 0.2 µs for each buffer.
    """

    __slots__ = (
        "_compiled",
        "_differentiable",
        "_eager",
        "_executions",
        "_fallback",
        "_run",
        "_statistics",
        "_verification",
    )

    def __init__(
        self,
        compiled: Callable[..., Any],
        verification: Verification | None,
        fallback: EagerFallback,
        executions: Executions,
        *,
        statistics: Sequence[int],
        differentiable: CompileKey | None,
    ) -> None:
        self._run: Callable[..., Any] | None = None  # the compiled code after the first call, unless the graph is eager
        self._compiled = compiled
        self._verification = verification
        self._eager: EagerGraph | None = None
        self._statistics = statistics  # the positions of running statistics
        self._differentiable = differentiable  # the target, if a backward pass may keep its graph
        self._fallback = fallback
        self._executions = executions

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if (run := self._run) is None:
            return self._first_call(inputs) if self._eager is None else self._eager(*inputs)
        self._executions.graphs += 1
        if not self._statistics:
            return run(*inputs)
        with _torch.autograd.preserve_versions(tuple([inputs[i] for i in self._statistics])):
            return run(*inputs)

    def _first_call(self, inputs: Sequence[Any]) -> Any:
        verification, self._verification = self._verification, None  # frees the captured graph after the call
        with _torch.autograd.preserve_versions(tuple([inputs[i] for i in self._statistics])):
            if verification is None:
                outputs, eager = self._compiled(*inputs), None
            else:
                outputs, eager = verification.call(inputs)
        if eager is not None:
            self._eager = EagerGraph(eager, self._executions, self._fallback)
            self._executions.eager_calls += 1
            return outputs
        self._executions.graphs += 1
        self._run = self._compiled
        if self._differentiable is not None and torch.is_grad_enabled():
            allow_repeated_backward(inputs, outputs, self._differentiable)
        return outputs


class EagerGraph:
    """Calls one captured graph eagerly, because it was not compiled, or because its compiled code is not used.

    If the compiler was ``out_of_memory``, this is recorded only after the eager run. If the eager run is out of memory
    too, it raises the user's own error, and the user may skip the batch. The next call then compiles again.
    """

    __slots__ = ("_executions", "_fallback", "_out_of_memory", "_run")

    def __init__(
        self,
        eager: torch.fx.GraphModule,
        executions: Executions,
        fallback: EagerFallback,
        out_of_memory: Exception | None = None,
    ) -> None:
        self._run = _torch.modes.restoring(eager.forward)
        self._executions = executions
        self._fallback = fallback
        self._out_of_memory = out_of_memory

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        self._executions.eager_calls += 1
        try:
            outputs = self._run(*inputs)
        except torch.OutOfMemoryError:
            self._fallback.call.compiles_again |= self._out_of_memory is not None
            raise
        if self._out_of_memory is not None:
            self._fallback.compiler_failed(self._out_of_memory)
            self._out_of_memory = None
        return outputs
