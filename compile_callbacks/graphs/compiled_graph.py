"""`CompiledGraph` and `EagerGraph`: the objects that Dynamo's code calls for a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.graphs.target_log import TargetLog
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.profiling.recorder import Executions


@dataclass(eq=False, slots=True)  # torch copies the attributes of an object without slots to a function that it keeps
class EagerGraph:
    """Calls one captured graph eagerly, because it was not compiled, or because its compiled code is not used.

    If the compiler was ``out_of_memory``, this is recorded only after the eager run. If the eager run is out of memory
    too, it raises the user's own error, and the user may skip the batch. The next call then compiles again.
    """

    graph: torch.fx.GraphModule
    log: TargetLog
    out_of_memory: Exception | None = None

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        self.log.recorder.part_runs_eagerly()
        try:
            with _torch.autograd.restored_after_error():  # takes 4 µs
                outputs = self.graph.forward(*inputs)
        except torch.OutOfMemoryError:
            self.log.eventful_call().recompiles_in_next_call |= self.out_of_memory is not None
            raise
        if self.out_of_memory is not None:
            self.log.compiler_failed(self.out_of_memory)
            self.out_of_memory = None
        return outputs


@dataclass(eq=False, slots=True)
class CompiledGraph:
    """Calls one compiled graph.

    Dynamo's code has a reference to this object, and is never deleted as long as the user's code exists. `free` deletes
    what this object calls.

    The first call compares the graph with eager, and decides which code later calls run. A later call adds only this
    frame. Until there is compiled code, calls run ``eager``. If a later call fails, such as at a size that torch has
    guessed, and the graph writes no input, the captured graph runs eagerly from then on.

    Like eager batch norm, a call does not raise the versions of running statistics. Eager batch norm saves them for the
    backward pass. If a compiled call raised their versions, the backward pass of an earlier eager call in the same step
    would fail: "modified by an inplace operation". This takes 0.2 µs for each buffer.
    """

    eager: EagerGraph | None  # the captured graph, without compiled code, or if the comparison rejects the code
    statistics: Callable[[Sequence[Any]], Any] | None
    executions: Executions
    preserve_versions: Callable[[Any], Any] = field(default_factory=_torch.autograd.preserve_versions)
    compiled: Callable[..., Any] | None = None
    verification: Verification | None = None  # compares the graph with eager in the first call
    run: Callable[..., Any] | None = None  # the compiled code after the first call, if the comparison accepts it
    spare: EagerGraph | None = None  # the captured graph, which runs if a call fails; no graph with a collective

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if (run := self.run) is None:
            return self._first_call(inputs)
        self.executions.graphs += 1
        try:
            if self.statistics is None:
                return run(*inputs)
            with self.preserve_versions(self.statistics(inputs)):
                return run(*inputs)
        except Exception as error:
            if self.spare is None or not _can_run_again(self.spare.graph, error, inputs):
                raise
            outputs = self.spare(*inputs)  # if this raises, the error is the user's
            self.executions.graphs -= 1
            self.spare.log.compiled_code_failed(error, part="a part of ")
            self.eager, self.compiled, self.run = self.spare, None, None
            return outputs

    def free(self) -> None:
        """Free the compiled code, its frozen weights, and the captured graph. No later call is possible."""
        self.eager = self.statistics = self.compiled = self.verification = self.run = self.spare = None

    def _first_call(self, inputs: Sequence[Any]) -> Any:
        if self.verification is not None:
            accepted = self.verification.accepts(inputs)  # may raise; the next call then compares again
            if accepted is None and self.compiled is not None:
                self.executions.graphs += 1
                return self.compiled(*inputs)
            if not accepted:
                self.eager = EagerGraph(self.verification.eager, self.verification.log)
            self.verification = None  # frees the captured graph of an accepted graph
        if self.eager is not None:
            return self.eager(*inputs)
        self.run = self.compiled
        return self(*inputs)


def _can_run_again(graph: torch.fx.GraphModule, error: Exception, inputs: Sequence[Any]) -> bool:
    """Return whether a graph may run again after an error: it writes no input, and is in no activation checkpoint."""
    if isinstance(error, torch.OutOfMemoryError) or _torch.autograd.saves_through_hooks():
        return False
    try:
        return not _torch.graphs.examine_graph(graph, inputs).written
    except Exception:
        return False


class CudaGraph:
    """Calls compiled code that records CUDA graphs.

    Users keep predictions, validation outputs and logged values for longer than a step. Without a copy, torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` when they read such a tensor later. An output
    that is an input or a view of an input is not copied.
    """

    def __init__(self, compiled: Callable[..., Any], device: torch.device, log: TargetLog) -> None:
        self._compiled = compiled
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._log = log
        self._owned: list[int] | None = None  # positions of outputs in CUDA graph memory, the same in each call

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the compiled code. The next step does not overwrite the outputs."""
        if _torch.inductor.end_failed_warmup(self._index):  # takes less than 1 µs
            self._report_repair()
        outputs = list(self._compiled(*inputs))
        if self._owned is None:
            of_inputs = {_storage(value) for value in inputs if _is_cuda(value)}
            self._owned = [i for i, value in enumerate(outputs) if _is_cuda(value) and _storage(value) not in of_inputs]
        for position in self._owned:
            outputs[position] = outputs[position].clone()
        return outputs

    def _report_repair(self) -> None:
        """Warn that the first run of a CUDA graph raised. The user may have caught the exception to skip a batch."""
        target, phase = self._log.key[:2]
        message = (
            f"target {target!r} ({phase} phase): the first run of a CUDA graph raised an exception "
            "before this call, such as OutOfMemoryError; torch runs and records that graph again at its next call"
        )
        self._log.warn_later("CC305", message)


def _is_cuda(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
