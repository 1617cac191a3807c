"""`CompiledGraph`: the object that Dynamo's code calls for a captured graph."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks.graphs.target_log import CODE_RAISED, TargetLog
from compile_callbacks.graphs.verification import Verification


@dataclass(eq=False, slots=True)  # torch copies the attributes of an object without slots to a function that it keeps
class CompiledGraph:
    """Calls one captured graph: compiled, or eagerly if there is no compiled code or if its code is not used.

    Dynamo's code has a reference to this object, and is never deleted as long as the user's code exists. `free` deletes
    what this object calls.

    The first call with compiled code compares it with eager, and decides which code later calls run. A later call adds
    only this frame. If a later call fails, such as at an index that eager also refuses, and the graph writes no input,
    the captured graph runs in its place.

    Like eager batch norm, a call does not raise the versions of running statistics. Eager batch norm saves them for the
    backward pass. If a compiled call raised their versions, the backward pass of an earlier eager call in the same step
    would fail: "modified by an inplace operation". This takes 0.2 µs for each buffer.
    """

    graph: torch.fx.GraphModule | None  # the captured graph
    log: TargetLog
    statistics: Callable[[Sequence[Any]], Any] | None = None  # returns the running statistics among the inputs
    has_collective: bool = False  # if a call fails, it must not run again, because other processes do not run it again
    preserve_versions: Callable[[Any], Any] = field(default_factory=_torch.autograd.preserve_versions)
    compiled: Callable[..., Any] | None = None  # the compiled code before the first call
    verification: Verification | None = None  # compares the graph with eager in the first call
    run: Callable[..., Any] | None = None  # the compiled code after the first call, if the comparison accepts it
    fits: Callable[[Sequence[Any]], bool] | None = None  # whether code of another process is valid for these inputs
    written: frozenset[int] | None = None  # the positions of the inputs that the graph writes, if they are known
    copies: dict[int, torch.Tensor] = field(default_factory=dict)  # of these inputs, in the calls before replays

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph."""
        if self.fits is not None and not self.fits(inputs):
            return self._run_eagerly(inputs)
        if (run := self.run) is None:
            return self._first_or_eager_call(inputs)
        self.log.recorder.executions.graphs += 1
        try:
            if self.statistics is None:
                return run(*inputs)
            with self.preserve_versions(self.statistics(inputs)):
                return run(*inputs)
        except torch.OutOfMemoryError:
            if not self._is_unchanged(inputs):
                raise
        except Exception as error:
            if self._can_run_again(inputs):
                outputs = self._run_eagerly(inputs)  # if this raises, the error is the user's
                self.log.recorder.executions.graphs -= 1
                self.log.compiler_failed(error, what=CODE_RAISED, part="a part of ")
                self.run = None
                return outputs
            target, phase = self.log.key[:2]
            setting = f"{self.log.recorder.mode_arguments[phase]}='eager'"
            text = f"raised by compiled code of target {target!r}; if eager code does not, set {setting}"
            error.add_note(with_code("CC301", text))
            raise
        del run
        return self._run_without_cuda_graphs(inputs)

    def free(self) -> None:
        """Free the compiled code, its frozen weights, and the captured graph. No later call is possible."""
        self.graph = self.statistics = self.compiled = self.verification = self.run = self.fits = None

    def _can_run_again(self, inputs: Sequence[Any]) -> bool:
        """Return whether the graph writes no input, and is in no activation checkpoint."""
        if self.graph is None or self.has_collective or _torch.autograd.saves_through_hooks():
            return False
        with contextlib.suppress(Exception):
            return not _torch.graphs.examine_graph(self.graph, inputs).written
        return False

    def _first_or_eager_call(self, inputs: Sequence[Any]) -> Any:
        if (compiled := self.compiled) is None:
            return self._run_eagerly(inputs)
        accepted = self.verification is None or self.verification.accepts(inputs)  # after an error, it compares again
        facts = self.verification and self.verification.facts
        self.run, self.compiled, self.verification = compiled if accepted else None, None, None
        if self.log.settings.static and accepted:
            with contextlib.suppress(Exception):
                self.written = (facts or _torch.graphs.examine_graph(self.graph, inputs)).written  # type: ignore[arg-type]
                self.run = functools.partial(self._warm_up_or_record, compiled, 2)
        del compiled  # which may have to be freed
        return self(*inputs)

    # ------------------------------------------------------------------------------------------ too little memory

    def _warm_up_or_record(self, compiled: Callable[..., Any], calls: int, *inputs: Any) -> Any:
        """Call compiled code that warms up, and then records a CUDA graph, with copies of the inputs that it writes."""
        self.copies = {i: inputs[i].detach().clone() for i in self.written or ()}
        outputs = compiled(*inputs)
        self.copies = {}
        self.run = functools.partial(self._warm_up_or_record, compiled, calls - 1) if calls > 1 else compiled
        return outputs

    def _is_unchanged(self, inputs: Sequence[Any]) -> bool:
        """After a failed call, restore the inputs that it may have written, and return whether it may run again."""
        known = self.written is not None and self.written == self.copies.keys()
        if not known or self.has_collective or _torch.autograd.saves_through_hooks():
            return False
        with torch.no_grad():
            for i, copy in self.copies.items():
                inputs[i].copy_(copy)
        return True

    def _run_without_cuda_graphs(self, inputs: Sequence[Any]) -> Any:
        """Free the compiled code, and run the graph eagerly, as earlier steps of the phase did."""
        self.run, self.copies = None, {}
        gc.collect()  # generated code has reference cycles
        torch.cuda.empty_cache()
        self.log.recorder.executions.graphs -= 1
        self.log.give_up_cuda_graphs("the CUDA graphs need more memory than is free")
        return self._run_eagerly(inputs)

    # ------------------------------------------------------------------------------------------ eagerly

    def _run_eagerly(self, inputs: Sequence[Any]) -> Any:
        self.log.recorder.part_runs_eagerly()
        assert self.graph is not None
        with _torch.autograd.restored_after_error():  # takes 4 µs
            return self.graph.forward(*inputs)


@dataclass(eq=False)
class CudaGraph:
    """Calls compiled code that records CUDA graphs.

    Users keep predictions, validation outputs and logged values for longer than a step. Without a copy, torch raises
    ``accessing tensor output of CUDAGraphs that has been overwritten`` when they read such a tensor later. An output
    that is an input or a view of an input is not copied.

    Copies take CPU time. When torch 2.14 is the oldest, test its option ``triton.cudagraph_trees_generation_cloning``,
    which copies only the outputs that are still alive when the next step begins.
    """

    compiled: Callable[..., Any]
    device_index: int
    owned: list[int] | None = None  # positions of outputs in CUDA graph memory, the same in each call

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the compiled code. The next step does not overwrite the outputs."""
        _torch.inductor.end_failed_warmup(self.device_index)  # takes less than 1 µs
        outputs = list(self.compiled(*inputs))
        if self.owned is None:
            of_inputs = {None, *map(_gpu_memory, inputs)}
            self.owned = [i for i, value in enumerate(outputs) if _gpu_memory(value) not in of_inputs]
        for position in self.owned:
            outputs[position] = outputs[position].clone()
        return outputs


def _gpu_memory(value: object) -> int | None:
    on_gpu = isinstance(value, torch.Tensor) and value.is_cuda
    return value.untyped_storage().data_ptr() if on_gpu else None  # type: ignore[attr-defined]
