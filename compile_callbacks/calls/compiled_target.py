"""`CompiledTarget`: compiles one target with the config of one phase, and runs it. A `Dispatcher` calls it."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, WarnOnce, with_code
from compile_callbacks._utils.signatures import signature
from compile_callbacks.calls.compiled_function import CompiledFunction
from compile_callbacks.calls.frozen_weights import WeightWatch
from compile_callbacks.calls.observed_calls import ObservedCalls
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.backend import GraphBackend
from compile_callbacks.graphs.target_log import TargetLog, TargetSettings
from compile_callbacks.profiling.events import CompileKey
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.profiling.recorder import CallInProgress, CompileRecorder
from compile_callbacks.targets.target import Callee, Target

_hooks_registered = _torch.dynamo.hooks_registered

TRACES_WITHOUT_GRAPH = 5
"""The maximum number of calls that torch traces without compiling a graph. torch 2.15 traces a target again in each
call if the target calls ``torch.autograd.grad``. Such a call takes 50 times as long as eager."""


class CompiledTarget:
    """A target that is compiled for a phase.

    Each compiled target has its own `GraphBackend`, which knows the target and the phase of its compiles.

    Attributes:
        key: The target, the phase, and the candidate.
        called: Whether the target was called in the phase.
        ran: Whether a call could have run the compiled function.
        log: Records failures. Its settings tell whether the config is on trial.
        backend: The backend, which has no reference to the module.
        function: The function of ``torch.compile``.
    """

    def __init__(
        self,
        target: Target,
        key: CompileKey,
        config: InductorConfig,
        *,
        recorder: CompileRecorder,
        warn: WarnOnce,
        settings: TargetSettings,
        unfrozen: CompiledTarget | None,
        observed: ObservedCalls,
    ) -> None:
        self.key = key
        self.called = False
        self.ran = False
        self._frozen = key.frozen
        self._unfrozen = unfrozen  # runs instead after frozen weights have changed within a stage
        self._ends_freezing = False
        self._recorder = recorder
        self._calling = recorder.calling
        self._executions = recorder.executions
        self._warn = warn
        self._warnings: tuple[tuple[str, str, Hashable], ...] = ()  # to issue at the end of a call
        self.log = TargetLog(self.key, recorder, settings)
        self.backend = GraphBackend(target, config, self.log)
        self.function = CompiledFunction(target, config, self.backend, self.log, observed)
        self._uncompilable: set[Any] = set()  # signatures of the inputs for which the compiler failed
        self._weights = WeightWatch(target.members[0].module)  # a target with frozen weights has a single member
        self._weights_are_suspect = True
        self._runs_target_eagerly = False
        self._traces = 0  # the number of calls in which torch traced
        self._transform_checks = _torch.dynamo.transform_checks()

    # ------------------------------------------------------------------------------------------ a call

    def call(self, member: Callee, /, *args: Any, **kwargs: Any) -> Any:
        """Call a member of the target compiled, or eagerly if it cannot be compiled."""
        calling, executions, function = self._calling, self._executions, self.function
        outer = calling.current
        # In the steady state, only these comparisons run before the compiled function. Each call takes time for them. A
        # function of ours whose code is no longer in the caches of the CPU takes 3 µs.
        hooks_changed = function.hooks_seen != _hooks_registered()
        transform, forward_ad_level = self._transform_checks
        transformed = transform() is not None or forward_ad_level() >= 0
        may_run_eagerly: Any = outer is not None or self._runs_target_eagerly or self._uncompilable or not self.ran
        if (may_run_eagerly or self._warnings or transformed) and self._runs_call_eagerly(outer, args, kwargs):
            # Within a call that missed, the outer call counts.
            self._count_eager_call(executions.graphs, counts=outer is None or not outer.missed)
            return member.eager(*args, **kwargs)
        compiled = self.backend.function
        if compiled is None or self._frozen or hooks_changed:
            if self._frozen and (unfrozen := self._free_if_weights_changed()) is not None:
                return unfrozen.call(member, *args, **kwargs)
            compiled = function.get()
        if self._recorder not in self._recorder.listeners:
            self._recorder.listen_after_reset()
        graphs_before = executions.graphs
        calling.current = call = CallInProgress()
        call.key, call.args, call.kwargs = self.key, args, kwargs
        function.calls += 1
        failed = False
        try:
            result = compiled(member.module, *args, **kwargs)
        except Exception:
            if not call.nothing_ran:
                self._store_outcome(call, failed=True)
                raise
            failed = True
        finally:
            calling.current = outer
            # torch runs none of its graphs for example at its recompile limit.
            if call.partly_eager or executions.graphs == graphs_before:
                self._count_eager_call(graphs_before, missed=call.missed)
        if failed:  # if the user's code raised the error, this raises it again with the user's traceback
            result = member.eager(*args, **kwargs)
        if call.eventful:
            calling.current = call
            try:
                self._settle(call, member)
            finally:
                calling.current = outer
                self._store_outcome(call)
            self._issue_warnings()
        return result

    def _count_eager_call(self, graphs_before: int, *, missed: bool = False, counts: bool = True) -> None:
        """Count a call that ran eagerly, or of which a part did."""
        if not counts:
            return
        executions = self._executions
        executions.eager_calls[self.key] += 1
        # If the same part runs eagerly in each call, its step times can be compared.
        varies = missed or executions.graphs == graphs_before or self.backend.waits
        executions.mixed |= self.backend.graphs > 0 and varies

    def _store_outcome(self, call: CallInProgress, *, failed: bool = False) -> None:
        if failed and call.recompiles_in_next_call:
            self.backend.free()
        self._runs_target_eagerly |= call.runs_target_eagerly
        self._warnings += call.warnings

    def _settle(self, call: CallInProgress, member: Callee) -> None:
        if call.failure is not None and not call.runs_target_eagerly:
            self._report_failure(call, call.failure)
        if call.compile_here is not None:
            call.compile_here()
        self.function.eager_frames.update(call.failed_frames)
        self._traces += call.traced
        if self._traces >= TRACES_WITHOUT_GRAPH and not (self.backend.graphs or call.runs_target_eagerly):
            reason = f"torch traced {TRACES_WITHOUT_GRAPH} calls and compiled no graph: {self.why_no_graph}"
            self.log.run_target_eagerly("CC101", reason)
        if call.constant_draws and self.log.settings.verify != "off":
            reason = (
                f"torch drew random numbers of Python in {', '.join(dict.fromkeys(call.constant_draws))} only while it "
                "traced, so that each call would get the same numbers"
            )
            if self.log.settings.verify == "raise":
                message = f"target {self.key.target!r} in the {self.key.phase} phase: {reason}"
                raise CompileError(with_code("CC306", message))
            self.log.run_target_eagerly("CC306", reason)

    def _issue_warnings(self) -> None:
        """Issue the warnings of earlier calls. The warnings of a candidate wait until the `Tune` has chosen it."""
        while self._warnings and not self.log.settings.on_trial:
            (code, message, about), self._warnings = self._warnings[0], self._warnings[1:]
            self._warn.warn(code, message, about=about)

    def _runs_call_eagerly(self, outer: CallInProgress | None, args: Any, kwargs: Any) -> bool:
        if outer is not None and outer.missed and not _torch.autograd.saves_through_hooks():
            return True
        self.called = True
        if _torch.dynamo.is_transformed():
            self._warn_of_transform()
            return True
        if not self.ran and (mode := _torch.modes.dispatch_mode()):
            self.function.why_no_graph = f"{mode} is active, and torch compiles nothing within a TorchDispatchMode"
            return True
        self._issue_warnings()
        self.ran = True
        # An activation checkpoint must run the same code in the forward pass and in the backward pass. Within a
        # checkpoint, the compiled function therefore continues, and runs graphs that differ from eager eagerly.
        if self._runs_target_eagerly and not _torch.autograd.saves_through_hooks():
            return True
        return bool(self._uncompilable) and signature((args, kwargs)) in self._uncompilable

    def _report_failure(self, call: CallInProgress, failure: BaseException) -> None:
        if self.log.settings.on_error == "raise":
            raise self.log.as_compile_error(failure) from failure
        if call.nothing_ran:
            self._uncompilable.add(signature((call.args, call.kwargs)))
        self.log.compiler_failed(failure, part="" if call.nothing_ran else "a part of ")

    def _warn_of_transform(self) -> None:
        target, phase = self.key[:2]
        message = (
            f"target {target!r} runs eagerly in the {phase} phase when it is called under a transform of torch.func or "
            "forward-mode AD: torch compiles a transform together with the function that it transforms. Name the "
            "method that contains both as the target"
        )
        if self._warn.warn("CC108", message, about=(target, phase)):  # also in a trial: it affects all candidates
            reason = "it is called under a transform of torch.func or forward-mode AD"
            self._recorder.record("eager_call", CompileKey(target, phase), reason=reason, code="CC108")

    # ------------------------------------------------------------------------------------------ frozen weights

    def invalidate_weights(self) -> None:
        """Compare all weights at the next call, because a callback may have swapped the weights."""
        self._weights_are_suspect = True

    def _free_if_weights_changed(self) -> CompiledTarget | None:
        """Return the target that runs instead, without frozen weights, once they have changed within a stage."""
        if self._ends_freezing:
            return self._unfrozen
        if self._weights.changed(thorough=self._weights_are_suspect) and self.backend.graphs:
            self.backend.free()  # because each set of frozen weights would stay in memory
            gc.collect()  # generated code has reference cycles
            if self._unfrozen is not None and not self._weights_are_suspect:
                self._end_freezing()
        self._weights_are_suspect = False
        return self._unfrozen if self._ends_freezing else None

    def _end_freezing(self) -> None:
        self._ends_freezing = True
        reason = "freezing has no effect on steps that change the weights"
        self._recorder.record("freezing", self.key, reason=reason, show=False)
        message = f"{reason}: target {self.key.target!r} runs without frozen weights. Set freezing=False in infer_mode"
        self._warnings += (("CC204", message, (self.key.target, "freezing")),)
        self._issue_warnings()

    @property
    def why_no_graph(self) -> str:
        """The reason why the target has no compiled graph: its first graph break, or what torch told."""
        reasons = [event.reason for event in self._recorder.events_of(self.key, "graph_break")]
        unknown = "TORCH_COMPILE_DISABLE is set" if _torch.dynamo.is_disabled() else "torch gives no reason"
        return short_reason(next(filter(None, [*reasons, self.function.why_no_graph]), unknown))
