"""`GraphBackend`: the ``torch.compile`` backend of a `CompiledTarget`. It compiles each captured graph."""

from __future__ import annotations

import functools
import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.compiled_graph import CompiledGraph, CudaGraph, EagerGraph
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, WaitingGraph
from compile_callbacks.graphs.verification import Verification
from compile_callbacks.passes.base import HOOK_OPTIONS, pass_hook, pass_name
from compile_callbacks.passes.manager import GraphPassError, PassRun, find_pass_error, pass_options
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

    def __init__(self, target: Target, config: InductorConfig, fallback: EagerFallback) -> None:
        self.graphs = 0  # the number of compiled graphs
        self.weights = 0  # the number of weights that are inputs of the compiled graphs; each graph counts its own
        self.shares_regions = False  # whether several regions of a graph shared their code
        # torch never frees a backend, so a backend must not keep the module alive.
        self._first = weakref.ref(target.members[0])
        self._modules = [weakref.ref(member.module) for member in target.members]
        self._shared = target.shares_code
        self._key = fallback.key
        self._config = config
        self._passes = (*fallback.settings.passes, *config.passes)
        self._recorder = fallback.recorder
        self._fallback = fallback
        self._template_checked = False
        self._generated: list[ModuleType] = []
        self._compiles_here = False  # whether another process could not compile a graph

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a captured graph. ``torch.compile`` gets this method as its ``backend``."""
        if self._recorder.stopping():
            reason = "the run was asked to stop before the compile began"
            self._recorder.record("fallback", self._key, reason=reason)
            return EagerGraph(_torch.graphs.eager_graph(graph_module), self._fallback)
        if _torch.autograd.is_captured_wrongly(graph_module):
            raise self._fallback.run_target_eagerly("CC307", _WRONG_FUNCTION)
        if self._key.phase == "train" and _torch.dynamo.ends_at_gradient(graph_module):
            raise self._fallback.run_target_eagerly("CC303", _OWN_GRADIENT)
        device = _device_of(example_inputs)
        # Weights are frozen only in stages in which they are constant, with any mode.
        options = {**self._config.resolved_options(device), "freezing": self._key.frozen}
        self._check_template(device)
        eager = _torch.graphs.eager_graph(graph_module)  # a copy, because Inductor changes the graph
        if self._fallback.has_regions and torch.is_grad_enabled() and self._has_joint_passes(options):
            raise RuntimeError("torch would run graph passes at the hook points of joint graphs twice on each region")
        self.shares_regions |= _torch.regions.shares_code(graph_module)
        member = self._first()
        assert member is not None  # because it is being called
        statistics = [i for i in _torch.graphs.written_statistics(eager) if not example_inputs[i].is_inference()]
        graph = CompiledGraph(
            EagerGraph(eager, self._fallback),
            operator.itemgetter(*statistics) if statistics else None,
            self._key if torch.is_grad_enabled() and not member.sharded else None,
            self._recorder.executions,
        )
        use = functools.partial(self._use, graph, eager, options, device)
        if not self._requests_code(graph_module, example_inputs, options, eager, use):
            compiled = self._compile_with_passes(graph_module, example_inputs, options)
            if isinstance(compiled, Exception):
                return self._run_graph_eagerly(eager, compiled)
            self._recorder.count_graph()  # after the compile, because Dynamo may restart its analysis and call this again
            use(compiled)
        self.graphs += 1
        self._fallback.eventful_call().graphs += 1
        self.weights += sum(isinstance(value, torch.nn.Parameter) for value in example_inputs)
        return graph

    def _use(
        self,
        graph: CompiledGraph,
        eager: torch.fx.GraphModule,
        options: Mapping[str, Any],
        device: torch.device,
        compiled: Callable[..., Any],
    ) -> None:
        """Let the next call of a graph run its compiled code, and compare it with eager."""
        uses_cudagraphs = self._config.uses_cudagraphs and device.type == "cuda"
        if uses_cudagraphs:
            compiled = CudaGraph(compiled, device, self._fallback)
        has_collective = _torch.graphs.has_collective(eager)
        if self._fallback.settings.verify != "off":
            graph.verification = Verification(
                compiled, eager, options, self._modules, self._fallback, has_collective, uses_cudagraphs
            )
        graph.compiled, graph.eager = compiled, None

    # ------------------------------------------------------------------------------------------ in another process

    def _requests_code(
        self,
        graph_module: torch.fx.GraphModule,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        eager: torch.fx.GraphModule,
        use: Callable[[Callable[..., Any]], None],
    ) -> bool:
        """Request the compiled code of a graph from another process. Return whether this is possible."""
        requests = self._fallback.settings.requests
        if requests is None or self._compiles_here:
            return False
        try:
            self._check_portable(eager)
            request = CompileRequest(
                graph=_torch.portable_graphs.portable_graph(graph_module, inputs),
                phase=self._key.phase,
                options=options,
                passes=self._passes,
                activation_memory_budget=self._config.activation_memory_budget,
            ).pickled()
        except _torch.portable_graphs.NotPortableError as error:
            self._recorder.record("foreground", self._key, reason=str(error))
            return False
        if requests.failure is None:
            requests.waiting.append(
                WaitingGraph(
                    key=self._key,
                    request=request,
                    load=functools.partial(self._load, eager, options, use),
                    compile_here=self._compile_here,
                )
            )
        return True

    def _check_portable(self, eager: torch.fx.GraphModule) -> None:
        reasons = {
            "its weights are frozen": self._key.frozen,
            "its repeated blocks are regions": self._fallback.has_regions,
            "it contains a collective": _torch.graphs.has_collective(eager),
        }
        for reason, applies in reasons.items():
            if applies:
                raise _torch.portable_graphs.NotPortableError(reason)

    def _load(
        self,
        eager: torch.fx.GraphModule,
        options: Mapping[str, Any],
        use: Callable[[Callable[..., Any]], None],
        answer: CompileAnswer,
    ) -> None:
        """Load the compiled code of a graph, and use it from its next call on."""
        started = time.perf_counter()
        try:
            compiled = _torch.portable_graphs.load(answer.artifact, options)
        except Exception as error:
            self._fallback.compiler_failed(error, what="the code that the helper process compiled cannot be loaded")
            return
        is_valid = _torch.portable_graphs.guard_of(answer.guards)
        use(compiled if is_valid is None else self._checked(compiled, eager, is_valid))
        self._recorder.record(
            "compile",
            self._key,
            part="load",
            seconds=time.perf_counter() - started,
            saved_mib=answer.saved_bytes / 2**20 if answer.backward_seconds else None,
            graphs=1,
        )
        self._recorder.record("background", self._key, seconds=answer.seconds)
        self._recorder.record("cache", self._key, cache_hits=int(answer.cached), cache_misses=int(not answer.cached))
        self._record_passes(answer.pass_runs, ())

    def _checked(
        self, compiled: Callable[..., Any], eager: torch.fx.GraphModule, is_valid: Callable[[Sequence[Any]], bool]
    ) -> Callable[..., Any]:
        """Return compiled code that is called only with the sizes for which it is valid."""
        executions, run_eagerly = self._recorder.executions, EagerGraph(eager, self._fallback)

        def call(*inputs: Any) -> Any:
            if is_valid(inputs):
                return compiled(*inputs)
            executions.graphs -= 1  # the caller counted this call
            return run_eagerly(*inputs)

        return call

    def _compile_here(self, reason: str) -> None:
        """Compile the target in this process from its next call on."""
        self._compiles_here = True
        self._recorder.record("foreground", self._key, reason=reason)
        self.free()

    def _run_graph_eagerly(self, eager: torch.fx.GraphModule, error: Exception) -> Callable[..., Any]:
        """Return a function that runs a graph eagerly, and record that the compiler failed."""
        shortage = next((e for e in _torch.dynamo.error_chain(error) if isinstance(e, torch.OutOfMemoryError)), None)
        if shortage is None:
            self._fallback.compiler_failed(error)
        else:
            shortage = type(shortage)(str(shortage))  # a copy, because the traceback keeps tensors alive
        return EagerGraph(eager, self._fallback, shortage)

    @property
    def weights_in_graphs(self) -> tuple[int, int] | None:
        """The number of weights that the graphs use, and of all weights, or ``None`` if they cannot be compared.

        They cannot be compared for a method, which may need only some weights of its module, for shared or sharded
        weights, and for frozen weights, which are not inputs of a graph.
        """
        member = self._first()
        if member is None or self._shared or member.method is not None or member.sharded or self._key.frozen:
            return None
        return self.weights, sum(1 for _ in member.module.parameters())

    def _check_template(self, device: torch.device) -> None:
        """Report once if the template falls back on this device. The first graph tells the device."""
        reason = None if self._template_checked else self._config.template_falls_back(device)
        self._template_checked = True
        if reason is not None:
            self._recorder.record("template", self._key, reason=reason)
            phase = self._key.phase
            self._fallback.warn("CC204", f"{self._recorder.mode_arguments[phase]}: {reason}", about=phase)

    # ------------------------------------------------------------------------------------------ passes

    def _compile_with_passes(
        self, graph: torch.fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Callable[..., Any] | Exception:
        """Compile a graph. If a pass fails, compile again without it. Return the error if the compiler fails."""
        skipped: list[Any] = []
        while True:
            again = _torch.graphs.copy_of_graph(graph) if self._passes else graph
            runs: list[PassRun] = []
            passes = pass_options(self._passes, self._key.phase, runs.append, skipped=skipped)
            try:
                with _torch.inductor.generated_with_constants() as generated:
                    compiled = _torch.inductor.compile_graph(
                        graph,
                        inputs,
                        options={**options, **passes},
                        activation_memory_budget=self._config.activation_memory_budget,
                        on_backward_lowered=self._recorder.add_backward,
                    )
            except _torch.dynamo.CONTROL_FLOW:
                raise
            except Exception as error:
                if self._fallback.settings.on_error == "raise":
                    raise
                failure = find_pass_error(error)
                if failure is None and self._fallback.has_regions:
                    raise  # because the compiled target then compiles without regions
                if failure is None or self._is_candidates_own(failure.failed):
                    return error
                self._report_failed_pass(failure)
                skipped.append(failure.failed)
                graph = again
            else:
                self._generated += generated
                self._record_passes(runs, skipped)
                return compiled

    def _has_joint_passes(self, options: Mapping[str, Any]) -> bool:
        hooks = {HOOK_OPTIONS[pass_hook(graph_pass)] for graph_pass in self._passes}
        return any(name.startswith("joint") for name in hooks | {name for name in options if name.endswith("_pass")})

    def _is_candidates_own(self, graph_pass: Any) -> bool:
        """Return whether the pass belongs to a candidate of a `Tune`, which would be another candidate without it."""
        return self._fallback.settings.on_trial and any(
            graph_pass is config_pass for config_pass in self._config.passes
        )

    def _record_passes(self, runs: Sequence[PassRun], skipped: Sequence[Any]) -> None:
        """Record the run of each pass. If a pass did not run, the graph is from torch's cache."""
        for run in runs:
            self._recorder.pass_runs.append((self._key, run.to_dict()))
        ran = {(run.name, run.hook) for run in runs}
        for graph_pass in self._passes:
            name, hook = pass_name(graph_pass), pass_hook(graph_pass)
            if (name, hook) not in ran and not any(graph_pass is skipped_pass for skipped_pass in skipped):
                self._recorder.pass_runs.append((self._key, {"name": name, "hook": hook, "from_cache": True}))

    def _report_failed_pass(self, failure: GraphPassError) -> None:
        self._recorder.record("pass_skipped", self._key, reason=str(failure))
        target, phase = self._key[:2]
        message = (
            f"{in_one_line(str(failure))} (target {target!r}); the graph is compiled without the pass (all failures: "
            f"report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        )
        self._fallback.warn("CC701", message, about=(target, phase, pass_name(failure.failed)))

    # ------------------------------------------------------------------------------------------ memory

    def free(self) -> None:
        """Free the compiled code, with its frozen weights."""
        _torch.dynamo.forget_compiled(self.compile)
        _torch.inductor.forget_generated(self._generated)
        self._generated.clear()


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Return the device of a graph, which is the GPU if any input or weight is on the GPU."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
