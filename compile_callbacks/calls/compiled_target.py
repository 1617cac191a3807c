"""`CompiledTarget`: compiles one target with the config of one phase, and runs it. A `Dispatcher` calls it."""

from __future__ import annotations

import gc
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, with_code
from compile_callbacks.calls.compiled_function import CompiledFunction
from compile_callbacks.calls.frozen_weights import WeightWatch
from compile_callbacks.calls.observed_calls import ObservedCalls
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.backend import GraphBackend
from compile_callbacks.graphs.target_log import TargetLog
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.profiling.recorder import CallInProgress
from compile_callbacks.targets.target import Callee, Target

_hooks_registered = _torch.dynamo.hooks_registered

TRACES_WITHOUT_GRAPH = 5
"""The maximum number of calls that torch traces without compiling a graph. torch 2.15 traces a target again in each
call if the target calls ``torch.autograd.grad``. Such a call takes 50 times as long as eager."""


class CompiledTarget:
    """A target that is compiled with one config, in one phase."""

    def __init__(
        self, target: Target, config: InductorConfig, log: TargetLog, observed: ObservedCalls, *, frozen: bool
    ) -> None:
        self.log, self.key, self.config = log, log.key, config
        self.called = False  # in the phase
        self.backend = GraphBackend(config, log, frozen=frozen)
        self.function = CompiledFunction(target, config, self.backend, log, observed)
        self.weights = WeightWatch(target.members[0].module) if frozen else None  # the target has a single member
        self._recorder = log.recorder
        self._traces = 0  # the number of calls in which torch traced
        self._transform_checks = _torch.dynamo.transform_checks()

    # ------------------------------------------------------------------------------------------ a call

    def call(self, member: Callee, /, *args: Any, **kwargs: Any) -> Any:
        """Call a member of the target compiled, or eagerly if it cannot be compiled."""
        recorder, function, log = self._recorder, self.function, self.log
        calling, executions = recorder.calling, recorder.executions
        outer = calling.current
        # In the steady state, only these comparisons run before the compiled function. Each call takes time for them. A
        # function of ours whose code is no longer in the caches of the CPU takes 3 µs.
        transforms, forward_ad_level = self._transform_checks
        is_transformed = transforms() > 0 or forward_ad_level() >= 0
        is_unusual = outer is not None or is_transformed or log.runs_eagerly or log.warnings or not self.called
        if is_unusual and self._runs_call_eagerly(outer, is_transformed):
            return member.eager(*args, **kwargs)
        compiled = self.backend.compiled_call
        if compiled is None or self.weights is not None or function.hooks_seen not in (None, _hooks_registered()):
            compiled = self._function_after_looks()
        if recorder not in recorder.listeners:
            recorder.listen_after_reset()
        graphs_before = executions.graphs
        calling.current = call = CallInProgress()
        call.key, call.args, call.kwargs = log.key, args, kwargs
        function.calls += 1
        failed = False
        try:
            result = compiled(member.module, *args, **kwargs)
        except Exception:
            if not call.nothing_ran:
                raise
            failed = True
        finally:
            calling.current = outer
            # torch runs none of its graphs for example at its recompile limit.
            if call.partly_eager or executions.graphs == graphs_before:
                executions.eager_calls[self.key] += 1
        if failed:  # if the user's code raised the error, this raises it again with the user's traceback
            result = member.eager(*args, **kwargs)
        if call.eventful:
            self._settle(call)
        return result

    def _runs_call_eagerly(self, outer: CallInProgress | None, is_transformed: bool) -> bool:
        """Look at what is unusual about a call, and return whether the call runs eagerly."""
        # An activation checkpoint must run the same code in the forward pass and in the backward pass. Within a
        # checkpoint, the compiled function therefore continues, and runs graphs that differ from eager eagerly.
        in_checkpoint, within_miss = _torch.autograd.saves_through_hooks(), outer is not None and outer.missed
        if within_miss and not in_checkpoint:
            return True
        if mode := "" if self.called else _torch.autograd.dispatch_mode():
            self.function.why_no_graph = f"{mode} is active, and torch compiles nothing within a TorchDispatchMode"
        self.called = True
        if is_transformed:
            self._warn_of_transform()
        else:
            self.log.issue_warnings()
        runs_eagerly = is_transformed or bool(mode) or (self.log.runs_eagerly and not in_checkpoint)
        if runs_eagerly and not within_miss:  # otherwise, the outer call counts
            self._recorder.executions.eager_calls[self.key] += 1
        return runs_eagerly

    def _settle(self, call: CallInProgress) -> None:
        """Act on what happened in a call."""
        log = self.log
        if call.failure is not None and not log.runs_eagerly:
            is_whole = call.nothing_ran and (self.config.fullgraph or not self.backend.graphs)
            log.compiler_failed(call.failure, part="" if is_whole else "a part of ")
            log.runs_eagerly = is_whole
        if call.compile_here is not None:
            call.compile_here()
        self.function.frames.update(dict.fromkeys(call.failed_frames))
        self._traces += call.traced
        if self._traces >= TRACES_WITHOUT_GRAPH and not (self.backend.graphs or log.runs_eagerly):
            reason = f"torch traced {TRACES_WITHOUT_GRAPH} calls and compiled no graph: {self.why_no_graph}"
            log.leave_eager("CC101", reason)
        if call.constant_draws and log.settings.verify != "off":
            reason = (
                f"torch drew random numbers of Python in {', '.join(dict.fromkeys(call.constant_draws))} only while it "
                "traced, so that each call would get the same numbers"
            )
            if log.settings.verify == "raise":
                message = f"target {self.key.target!r} in the {self.key.phase} phase: {reason}"
                raise CompileError(with_code("CC306", message))
            log.leave_eager("CC306", reason)
        log.issue_warnings()

    def _warn_of_transform(self) -> None:
        target, phase = self.key[:2]
        message = (
            f"target {target!r} runs eagerly in the {phase} phase when it is called under a transform of torch.func or "
            "forward-mode AD: torch compiles a transform together with the function that it transforms. Name the "
            "method that contains both as the target"
        )
        if self.log.warn.warn("CC108", message, about=(target, phase)):  # also in a trial: it affects all candidates
            reason = "it is called under a transform of torch.func or forward-mode AD"
            self._recorder.record("eager_call", CompileKey(target, phase), reason=reason, code="CC108")

    @property
    def why_no_graph(self) -> str:
        """The reason why the target has no compiled graph: its first graph break, or what torch told."""
        reasons = [event.reason for event in self._recorder.events_of(self.key, "graph_break")]
        unknown = "TORCH_COMPILE_DISABLE is set" if _torch.dynamo.is_disabled() else "torch gives no reason"
        return short_reason(next(filter(None, [*reasons, self.function.why_no_graph]), unknown))

    # ------------------------------------------------------------------------------------------ frozen weights

    def _function_after_looks(self) -> Any:
        """Return the function of ``torch.compile``, after a look at hooks and at frozen weights.

        If frozen weights have changed, free the code. After a change within a stage, freeze no more.
        """
        within_stage = self.weights is not None and not self.weights.are_suspect
        if self.weights is not None and self.weights.changed() and self.backend.graphs:
            self.backend.free()  # because each set of frozen weights would stay in memory
            gc.collect()  # generated code has reference cycles
            if within_stage:
                self.weights, self.backend.frozen = None, False
                reason, name = "freezing has no effect on steps that change the weights", self.key.target
                self._recorder.record("freezing", self.key, reason=reason)
                message = f"{reason}: target {name!r} runs without frozen weights. Set freezing=False in infer_mode"
                self.log.warn_later("CC204", message, about=(name, "freezing"))
        return self.function.get()
