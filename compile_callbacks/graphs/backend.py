"""`GraphBackend`: the ``torch.compile`` backend of a `CompiledTarget`. It compiles each captured graph."""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.captured_graph import communicates, has_unknown_size, written_statistics
from compile_callbacks.graphs.compiled_graph import CompiledGraph, CudaGraph
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, WaitingGraph
from compile_callbacks.graphs.target_log import TargetLog
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.passes.manager import with_passes

_WRONG_FUNCTION = (
    "torch older than 2.13 computes wrong gradients if it captures a torch.autograd.Function whose forward changes a "
    "tensor in place"
)

_OWN_GRADIENT = (
    "it calls torch.autograd.grad, and torch cannot differentiate the backward pass of the graph that ends there"
)


_Use = Callable[[Callable[..., Any], Callable[[Sequence[Any]], bool] | None], None]
"""Uses compiled code, which may be valid for some inputs only."""


class GraphBackend:
    """Compiles each graph that Dynamo captures from a target.

    If Inductor or a graph pass fails on a graph, or the process was asked to stop, the graph runs eagerly.
    """

    def __init__(self, config: InductorConfig, log: TargetLog, *, frozen: bool) -> None:
        self.compiled_call: Callable[..., Any] | None = None  # calls the graphs; None if the next call must compile
        self.graphs = 0  # the number of compiled graphs that are not freed
        self.frozen = frozen  # whether the weights are frozen
        self.has_collective = False  # whether a graph communicates with other processes
        # Whether a backward pass may keep its graph (retain_graph=True). Set just before Dynamo calls `compile`.
        self.keeps_graph = False
        self._config = config
        self._passes = (*log.settings.passes, *config.passes)
        self._log = log
        self._compiles_here = False  # whether another process could not compile a graph
        self._in_memory: list[CompiledGraph] = []  # the graphs to free

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a captured graph. ``torch.compile`` gets this method as its ``backend``."""
        log, config = self._log, self._config
        eager = _torch.graphs.eager_graph(graph_module)  # a copy, because Inductor changes the graph
        if log.recorder.stopping():
            log.recorder.record("fallback", log.key, reason="the run was asked to stop before the compile began")
            self._in_memory.append(stopped := CompiledGraph(eager, log))
            return stopped
        self._check_capture(graph_module)
        device = _device_of(example_inputs)
        # Weights are frozen only in stages in which they are constant, with any mode.
        options = {**config.resolved_options(device), "freezing": self.frozen}
        if log.settings.static and any(isinstance(value, torch.SymInt) for value in example_inputs):
            log.give_up_cuda_graphs("a graph has a dynamic dimension or number")
            options["triton.cudagraphs"] = False
        arguments = {
            "options": options,
            "activation_memory_budget": config.activation_memory_budget,
            "keeps_graph": self.keeps_graph,
        }
        self.has_collective |= (has_collective := communicates(graph_module))  # the copy has no metadata of DTensors
        statistics = [i for i in written_statistics(eager) if not example_inputs[i].is_inference()]
        graph = CompiledGraph(eager, log, operator.itemgetter(*statistics) if statistics else None, has_collective)

        def use(compiled: Callable[..., Any], fits: Callable[[Sequence[Any]], bool] | None = None) -> None:
            if options.get("triton.cudagraphs") and device.type == "cuda":
                compiled = CudaGraph(compiled, device.index)
            if log.settings.verify != "off":  # the next call compares the code with eager
                graph.verification = Verification(compiled, eager, options, log, has_collective)
            graph.compiled, graph.fits = compiled, fits

        is_requested = self._is_requested(graph_module, example_inputs, arguments, use)
        compiled = None if is_requested else self._compile(graph_module, example_inputs, arguments)
        # After the compile, because Dynamo may restart its analysis and call this again.
        self._in_memory.append(graph)
        if isinstance(compiled, Exception):
            log.compiler_failed(compiled)
            return graph
        if compiled is not None:
            log.recorder.count_graph()
            use(compiled)
        self.graphs += 1
        return graph

    def _check_capture(self, graph_module: torch.fx.GraphModule) -> None:
        """Let the target run eagerly if torch may compute wrong results or gradients for a captured graph."""
        if _torch.torch_2_11.is_captured_wrongly(graph_module):
            raise self._log.leave_eager("CC307", _WRONG_FUNCTION)
        if self._log.key.phase == "train" and _torch.torch_2_11.ends_at_gradient(graph_module):
            raise self._log.leave_eager("CC303", _OWN_GRADIENT)
        if not self._log.settings.may_guess and has_unknown_size(graph_module):
            raise self._log.leave_eager("CC301", "torch would guess that a size which it computes is not 1")

    def free(self) -> None:
        """Free the compiled code, with its frozen weights. The next call of the target compiles again."""
        self.compiled_call, self.graphs = None, 0
        queue = self._log.settings.requests
        queue.waiting = [graph for graph in queue.waiting if graph.backend is not self]  # load no code for it
        for graph in self._in_memory:
            graph.free()
        self._in_memory.clear()

    # ------------------------------------------------------------------------------------------ in another process

    @property
    def waits(self) -> bool:
        """Whether a graph has no compiled code yet."""
        waits = any(graph.backend is self for graph in self._log.settings.requests.waiting)
        return waits or (self._compiles_here and not self.graphs)

    def _is_requested(
        self, graph_module: torch.fx.GraphModule, inputs: Sequence[Any], arguments: Mapping[str, Any], use: _Use
    ) -> bool:
        """Request the code of a graph from another process. Return whether the process may compile it."""
        key, queue = self._log.key, self._log.settings.requests
        if self._compiles_here or not queue.in_run or (self._log.settings.on_trial and not queue.takes_trials):
            return False
        try:
            if self.frozen or self.has_collective:
                reason = "its weights are frozen" if self.frozen else "it contains a collective"
                raise _torch.portable_graphs.NotPortableError(reason)
            graph = _torch.portable_graphs.portable_graph(graph_module, inputs)
            request = CompileRequest(graph=graph, phase=key.phase, passes=self._passes, arguments=arguments)
            load = functools.partial(self._load, request, use)
            queue.waiting.append(WaitingGraph(key, request.pickled(), load, self._compile_here, self))
        except Exception as error:  # also if torch has changed what a request needs
            self._log.recorder.record("foreground", key, reason=in_one_line(str(error)))
            return False
        return True

    def _load(self, request: CompileRequest, use: _Use, answer: CompileAnswer) -> None:
        """Load compiled code, and use it from the next call on."""
        started, recorder, key = time.perf_counter(), self._log.recorder, self._log.key
        compiled = _torch.portable_graphs.load(answer.artifact, request.arguments["options"])
        # Inductor may compile code that is valid for some sizes only. In this process, it would add guards to Dynamo's.
        is_valid = _torch.portable_graphs.guard_of(answer.guards, request.graph.symbol_positions)
        use(
            compiled,
            (lambda inputs: is_valid(inputs) or self._does_not_fit()) if request.graph.symbol_positions else None,
        )
        seconds, saved_mib = time.perf_counter() - started, answer.saved_bytes / 2**20 or None
        recorder.record("compile", key, part="load", seconds=seconds, saved_mib=saved_mib, graphs=1)
        recorder.record("background", key, seconds=answer.seconds)
        recorder.record("cache", key, cache_hits=int(answer.cached), cache_misses=int(not answer.cached))
        recorder.executions.pass_runs += [(key, run) for run in answer.pass_runs]

    def _does_not_fit(self) -> bool:
        # Freed after the call, because other graphs of the target may still run in it.
        reason = "the code of another process is not valid for the sizes of a call"
        self._log.eventful_call().compile_here = functools.partial(self._compile_here, reason)
        return False

    def _compile_here(self, reason: str) -> None:
        """Compile the target in this process from its next call on."""
        self._compiles_here = True
        self._log.recorder.record("foreground", self._log.key, reason=reason)
        self.free()

    def _compile(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], arguments: Mapping[str, Any]
    ) -> Callable[..., Any] | Exception:
        """Compile a graph with the passes. Return the error if the compiler or a pass fails."""
        log, runs = self._log, list[dict[str, Any]]()
        options = with_passes(arguments["options"], self._passes, log.key.phase, runs.append)
        try:
            compiled: Callable[..., Any] = _torch.inductor.compile_graph(
                graph, inputs, **{**arguments, "options": options}, on_backward_lowered=log.recorder.add_backward
            )
        except _torch.dynamo.control_flow():
            raise
        except Exception as error:
            if log.settings.on_error == "raise":
                raise
            return error
        # If a pass did not run, the graph is from torch's cache.
        ran = {(run["name"], run["hook"]) for run in runs}
        cached = [each for each in self._passes if (each.name, each.hook) not in ran]
        runs += [{"name": each.name, "hook": each.hook, "from_cache": True} for each in cached]
        log.recorder.executions.pass_runs += [(log.key, run) for run in runs]
        return compiled


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Return the device of a graph, which is the GPU if any input or weight is on the GPU."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
