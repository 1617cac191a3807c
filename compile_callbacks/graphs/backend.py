"""`GraphBackend`: the ``torch.compile`` backend of a `CompiledTarget`. It compiles each captured graph."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.compiled_graph import CompiledGraph, CudaGraph, EagerGraph
from compile_callbacks.graphs.requested_graph import RequestedGraph
from compile_callbacks.graphs.requests import CompileRequest
from compile_callbacks.graphs.target_log import TargetLog
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.passes.manager import GraphPassError, find_pass_error, with_passes
from compile_callbacks.targets.target import Target

_WRONG_FUNCTION = (
    "torch older than 2.13 computes wrong gradients if it captures a torch.autograd.Function whose forward changes a "
    "tensor in place"
)

_OWN_GRADIENT = (
    "it calls torch.autograd.grad, and torch cannot differentiate the backward pass of the graph that ends there"
)


class GraphBackend:
    """Compiles each graph that Dynamo captures from a target.

    If Inductor fails on a graph, or the process was asked to stop, the graph runs eagerly. If a graph pass fails, the
    backend compiles the graph without the pass.
    """

    def __init__(self, target: Target, config: InductorConfig, log: TargetLog, *, frozen: bool) -> None:
        self.function: Callable[..., Any] | None = None  # calls the graphs; None if the next call must compile
        self.graphs = 0  # the number of compiled graphs
        self.frozen = frozen  # whether the weights are frozen
        self.has_collective = False  # whether a graph communicates with other processes
        self.keeps_graph = False  # whether a backward pass may keep its graph (retain_graph=True)
        self._weights = set[int]()  # the ids of the weights that are inputs of the compiled graphs
        # torch never frees a backend, so a backend must not keep the module alive.
        self._target = weakref.ref(target)
        self._modules = [weakref.ref(member.module) for member in target.members]
        self._key = log.key
        self._config = config
        self._passes = (*log.settings.passes, *config.passes)
        self._recorder = log.recorder
        self._log = log
        self._template_checked = False
        self.requested: list[RequestedGraph] = []  # graphs that another process compiles
        self._compiles_here = False  # whether another process could not compile a graph
        self._in_memory: list[CompiledGraph] = []  # the graphs to free

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a captured graph. ``torch.compile`` gets this method as its ``backend``."""
        if self._recorder.stopping():
            reason = "the run was asked to stop before the compile began"
            self._recorder.record("fallback", self._key, reason=reason)
            return EagerGraph(_torch.graphs.eager_graph(graph_module), self._log)
        self._check_capture(graph_module)
        device = _device_of(example_inputs)
        # Weights are frozen only in stages in which they are constant, with any mode.
        options = {**self._config.resolved_options(device), "freezing": self.frozen}
        self._check_template(device)
        eager = _torch.graphs.eager_graph(graph_module)  # a copy, because Inductor changes the graph
        has_collective = _torch.graphs.has_collective(graph_module)  # the copy has no metadata of DTensors
        self.has_collective |= has_collective
        statistics = [i for i in _torch.graphs.written_statistics(eager) if not example_inputs[i].is_inference()]
        read_statistics = operator.itemgetter(*statistics) if statistics else None

        def new_graph() -> CompiledGraph:
            graph = CompiledGraph(EagerGraph(eager, self._log), read_statistics, self._recorder.executions)
            graph.spare = None if has_collective else graph.eager
            self._in_memory.append(graph)
            return graph

        def use(graph: CompiledGraph, compiled: Callable[..., Any]) -> None:
            if self._config.uses_cudagraphs and device.type == "cuda":
                compiled = CudaGraph(compiled, device, self._log)
            if self._log.settings.verify != "off":  # the next call compares the code with eager
                communicates = has_collective or _torch.graphs.may_communicate(eager)
                graph.verification = Verification(compiled, eager, options, self._modules, self._log, communicates)
            graph.compiled, graph.eager = compiled, None

        graph = self._requested_graph(graph_module, example_inputs, options, new_graph, use, has_collective)
        if graph is None:
            compiled = self._compile_with_passes(graph_module, example_inputs, options)
            if isinstance(compiled, Exception):
                return self._run_graph_eagerly(eager, compiled)
            # After the compile, because Dynamo may restart its analysis and call this again.
            self._recorder.count_graph()
            graph = new_graph()
            use(graph, compiled)
        self.graphs += 1
        self._weights.update(id(value) for value in example_inputs if isinstance(value, torch.nn.Parameter))
        return graph

    def _check_capture(self, graph_module: torch.fx.GraphModule) -> None:
        """Let the target run eagerly if torch may compute wrong results or gradients for a captured graph."""
        if _torch.torch_2_11.is_captured_wrongly(graph_module):
            raise self._log.run_target_eagerly("CC307", _WRONG_FUNCTION)
        if self._key.phase == "train" and _torch.torch_2_11.ends_at_gradient(graph_module):
            raise self._log.run_target_eagerly("CC303", _OWN_GRADIENT)
        if not self._log.settings.may_guess and (where := _torch.graphs.guesses_size_at(graph_module)):
            raise self._log.run_target_eagerly("CC301", f"torch would guess at {where!r} that a size is not 1")

    def _requested_graph(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        new_graph: Callable[[], CompiledGraph],
        use: Callable[[CompiledGraph, Callable[..., Any]], None],
        has_collective: bool,
    ) -> Callable[..., Any] | None:
        """Request the code of a graph from another process, or return ``None`` if this process must compile it."""
        settings, requests = self._log.settings, self._log.settings.requests
        if (
            requests is None
            or not requests.in_run
            or self._compiles_here
            or (settings.on_trial and not requests.takes_trials)
        ):
            return None
        try:
            if self.frozen or has_collective:
                reason = "its weights are frozen" if self.frozen else "it contains a collective"
                raise _torch.portable_graphs.NotPortableError(reason)
            request = CompileRequest(
                graph=_torch.portable_graphs.portable_graph(graph_module, inputs),
                phase=self._key.phase,
                options=options,
                passes=self._passes,
                activation_memory_budget=self._config.activation_memory_budget,
                keeps_graph=self.keeps_graph,
            )
            graph = RequestedGraph(request, requests, self._log, new_graph, use, self._compile_here)
        except Exception as error:  # also if torch has changed what a request needs
            self._recorder.record("foreground", self._key, reason=in_one_line(str(error)))
            return None
        self.requested.append(graph)
        return graph if request.graph.symbol_positions else graph.first

    def _compile_here(self, reason: str) -> None:
        """Compile the target in this process from its next call on."""
        self._compiles_here, self.graphs = True, 0
        self._recorder.record("foreground", self._key, reason=reason)
        self.free()

    def _run_graph_eagerly(self, eager: torch.fx.GraphModule, error: Exception) -> Callable[..., Any]:
        """Return a function that runs a graph eagerly, and record that the compiler failed."""
        shortage = next((e for e in _torch.dynamo.error_chain(error) if isinstance(e, torch.OutOfMemoryError)), None)
        if shortage is None:
            self._log.compiler_failed(error)
        else:
            shortage = type(shortage)(str(shortage))  # a copy, because the traceback keeps tensors alive
        return EagerGraph(eager, self._log, shortage)

    @property
    def waits(self) -> bool:
        """Whether a graph has no compiled code yet."""
        self.requested = [graph for graph in self.requested if graph.waits]
        return bool(self.requested) or (self._compiles_here and not self.graphs)

    @property
    def weights_in_graphs(self) -> tuple[int, int] | None:
        """The number of weights that the graphs use, and of all weights, or ``None`` if they cannot be compared.

        They cannot be compared for a method, which may need only some weights of its module, for shared or sharded
        weights, and for frozen weights, which are not inputs of a graph.
        """
        target = self._target()
        if target is None or target.shares_code or self.frozen:
            return None
        member = target.members[0]
        if member.method is not None or member.sharded:
            return None
        return len(self._weights), sum(1 for _ in member.module.parameters())

    def _check_template(self, device: torch.device) -> None:
        """Report once if the template falls back on this device. The first graph tells the device."""
        reason = None if self._template_checked else self._config.template_falls_back(device)
        self._template_checked = True
        if reason is not None:
            self._recorder.record("template", self._key, reason=reason)
            phase = self._key.phase
            self._log.warn_later("CC204", f"{self._recorder.mode_arguments[phase]}: {reason}", about=phase)

    # ------------------------------------------------------------------------------------------ passes

    def _compile_with_passes(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[..., Any] | Exception:
        """Compile a graph. If a pass fails, compile again without it. Return the error if the compiler fails."""
        skipped: list[Any] = []
        while True:
            runs: list[dict[str, Any]] = []
            changed = with_passes(options, self._passes, self._key.phase, runs.append, skipped=skipped)
            again = _torch.graphs.copy_of_graph(graph) if changed != options else graph
            try:
                compiled: Callable[..., Any] = _torch.inductor.compile_graph(
                    graph,
                    inputs,
                    options=changed,
                    activation_memory_budget=self._config.activation_memory_budget,
                    keeps_graph=self.keeps_graph,
                    on_backward_lowered=self._recorder.add_backward,
                )
            except _torch.dynamo.control_flow():
                raise
            except Exception as error:
                if self._log.settings.on_error == "raise":
                    raise
                failure = find_pass_error(error)
                own = self._config.passes if self._log.settings.on_trial else ()
                # Without a pass of its own, a candidate of a `Tune` would be another candidate.
                if failure is None or any(graph_pass is failure.failed for graph_pass in own):
                    return error
                self._report_failed_pass(failure)
                skipped.append(failure.failed)
                graph = again
            else:
                self._record_passes(runs, skipped)
                return compiled

    def _record_passes(self, runs: Sequence[dict[str, Any]], skipped: Sequence[Any]) -> None:
        """Record the run of each pass. If a pass did not run, the graph is from torch's cache."""
        self._recorder.executions.pass_runs += [(self._key, run) for run in runs]
        ran = {(run["name"], run["hook"]) for run in runs}
        for graph_pass in self._passes:
            name, hook = graph_pass.name, graph_pass.hook
            if (name, hook) not in ran and not any(graph_pass is skipped_pass for skipped_pass in skipped):
                cached = {"name": name, "hook": hook, "from_cache": True}
                self._recorder.executions.pass_runs.append((self._key, cached))

    def _report_failed_pass(self, failure: GraphPassError) -> None:
        self._recorder.record("pass_skipped", self._key, reason=str(failure))
        target, phase = self._key[:2]
        message = (
            f"{in_one_line(str(failure))} (target {target!r}); the graph is compiled without the pass (all failures: "
            f"report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        )
        self._log.warn_later("CC701", message, about=(target, phase, id(failure.failed)))

    # ------------------------------------------------------------------------------------------ memory

    def free(self) -> None:
        """Free the compiled code, with its frozen weights. The next call of the target compiles again."""
        self.function = None
        for graph in self.requested:
            graph.cancel()
        self.requested.clear()
        for in_memory in self._in_memory:
            in_memory.free()
        self._in_memory.clear()


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Return the device of a graph, which is the GPU if any input or weight is on the GPU."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
