"""`CompiledTarget`: compiles one target with the config of one phase, and runs it. A `Dispatcher` calls it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, WarnOnce, with_code
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import shapes, signature
from compile_callbacks.calls.call_state import CallInProgress
from compile_callbacks.calls.frozen_weights import WeightWatch
from compile_callbacks.calls.new_shapes import ObservedShapes, ShapePolicy
from compile_callbacks.calls.python_state import StateChanges
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.backend import GraphBackend
from compile_callbacks.graphs.failures import EagerFallback, TargetIsEagerError, TargetSettings, describe
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder, TargetCall
from compile_callbacks.targets.repeated import RegionMarks
from compile_callbacks.targets.target import AnyTarget, RepeatedBlocks, Target

TRACES_WITHOUT_GRAPH = 5
"""The maximum number of consecutive calls that torch traces without compiling a graph. torch 2.15 traces a target again
in each call if the target calls ``torch.autograd.grad``. Such a call takes 50 times as long as eager."""


class CompiledTarget:
    """A target that is compiled for a phase.

    Each compiled target has its own `GraphBackend`, which knows the target and the phase of its compiles.

    Repeated blocks form one target: the compiled function takes the block as an argument, and torch's guards decide
    which blocks need separate graphs. Regions are repeated blocks within a target's graph, which torch compiles once.

    Attributes:
        key: The target, the phase, and the candidate.
        called: Whether the target was called in the phase.
        ran: Whether a call could have run the compiled function.
        gave_up_regions: Whether the whole target is compiled, because torch cannot compile its regions.
        observed: The dimensions of the inputs that vary.
    """

    def __init__(
        self,
        target: AnyTarget,
        phase: Phase,
        config: InductorConfig,
        *,
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        warn: WarnOnce | None = None,
        settings: TargetSettings | None = None,
        frozen: bool = False,
        candidate: str | None = None,
        observed: ObservedShapes | None = None,
    ) -> None:
        settings = settings or TargetSettings()
        self.key = CompileKey(target.name, phase, frozen, candidate)
        self.called = False
        self.ran = False
        self.gave_up_regions = False
        self.observed = observed or ObservedShapes()
        self._config = config
        self._frozen = frozen
        self._members = target.members
        self._shares_as_asked = isinstance(target, RepeatedBlocks) and target.asked_for
        self._regions = RegionMarks(target.regions) if target.regions else None
        self._recorder = recorder
        self._calling = recorder.calling
        self._warn = warn or WarnOnce()
        self._fallback = EagerFallback(self.key, recorder, settings, self._warn, has_regions=bool(target.regions))
        self._backend = GraphBackend(
            target,
            self.key,
            config,
            passes,
            recorder=recorder,
            fallback=self._fallback,
        )
        # One policy for each block, because the first block gets other inputs than later blocks (requires_grad).
        self._shapes = {member: ShapePolicy(settings.new_shapes) for member in self._members}
        self._limits_shapes = settings.new_shapes != "recompile"
        self._uncompilable: set[Any] = set()  # signatures of the inputs for which the compiler failed
        self._guards_hooks = False
        self._hooks_seen: int | None = -1  # the target has not looked for hooks yet
        self._weights = WeightWatch(self._members[0].module)  # a target with frozen weights has a single member
        self._weights_are_suspect = True
        self._state_changes: StateChanges | None = None  # until a new graph was called without a trace
        self._while_tracing = contextlib.ExitStack()
        self._traces_without_graph = 0
        self._frozen_draws: list[str] = []  # functions in which torch drew random numbers only while it traced
        self._compiled_of: dict[Any, set[Target]] = {}
        self._compiled: Callable[..., Any] | None = self._compile()

    # ------------------------------------------------------------------------------------------ a call

    def call(self, member: Target, /, *args: Any, **kwargs: Any) -> Any:
        """Call a member of the target compiled, or eagerly if it cannot be compiled."""
        calling, fallback = self._calling, self._fallback
        outer = calling.current
        # In the steady state, only these comparisons run before the compiled function. Each call takes time for them. A
        # function of ours whose code is no longer in the caches of the CPU takes 3 µs.
        hooks_changed = self._hooks_seen != _torch.dynamo.hooks_registered()
        may_run_eagerly = outer is not None or fallback.runs_eagerly or self._uncompilable or not self.ran
        may_run_eagerly = may_run_eagerly or (self.gave_up_regions and self._regions is not None)
        if (may_run_eagerly or hooks_changed) and self._runs_eagerly(outer, args, kwargs):
            self._recorder.executions.eager_calls += 1
            return member.eager(*args, **kwargs)
        compiled = self._compiled
        if compiled is None or self._frozen or hooks_changed:
            compiled = self._current_function()
        if self._recorder.listener not in self._recorder.listeners:
            self._recorder.listen_after_reset()
        stance = self._stance(member, args, kwargs) if self._limits_shapes else None
        failure, graphs = None, self._backend.graphs
        executed = self._recorder.executions.graphs
        if self._state_changes is not None:
            self._state_changes.call_begins(member.module)
        calling.current = call = CallInProgress(self, member, args, kwargs, stance is not None)
        try:
            if stance is None:
                result = compiled(member.module, *args, **kwargs)
            else:
                result = self._call_under(stance, compiled, member, args, kwargs)
        except Exception as error:
            if not _torch.dynamo.raised_while_compiling(error):
                if self._backend.must_compile_again:
                    self.free_compiled()
                raise
            failure = error
        finally:
            calling.current = outer
            if call.snapshot is not None:
                self._while_tracing.close()
        if failure is not None:
            if call.snapshot is not None:
                call.snapshot.restore()
            result = self._call_after_failure(member, failure, args, kwargs)
        self._recorder.executions.eager_calls += self._recorder.executions.graphs == executed
        traced, has_new_graph = call.snapshot is not None, self._backend.graphs > graphs
        if traced or has_new_graph or self._traces_without_graph or fallback.region_failure is not None:
            self._after_trace(member, args, kwargs, traced=traced, has_new_graph=has_new_graph)
        if self._state_changes is not None:
            self._check_state(self._state_changes, member, traced=traced)
        if fallback.pending:
            fallback.issue_warnings()
        return result

    def _after_trace(self, member: Target, args: Any, kwargs: Any, *, traced: bool, has_new_graph: bool) -> None:
        if has_new_graph:  # also if no recorder listens, so that the trace was not noticed (keep_compiled)
            self._graphs_were_compiled(member, args, kwargs)
        if self._fallback.region_failure is not None:
            self._give_up_regions(self._fallback.region_failure)
        self._count_traces(traced=traced, compiled=has_new_graph)
        if self._frozen_draws and not self.observed.changing_state.nothing_changes:
            functions, self._frozen_draws = ", ".join(dict.fromkeys(self._frozen_draws)), []
            self._leave_frozen(
                f"torch drew random numbers of Python in {functions} only while it traced, so that each call would get "
                "the same numbers"
            )

    def _count_traces(self, *, traced: bool, compiled: bool) -> None:
        """Run the target eagerly if torch traces each call without compiling a graph."""
        if not traced or compiled:
            self._traces_without_graph = 0
            return
        self._traces_without_graph += 1
        if self._traces_without_graph == TRACES_WITHOUT_GRAPH and not (
            self._backend.graphs or self._fallback.runs_eagerly
        ):
            reason = f"torch traced {TRACES_WITHOUT_GRAPH} calls one after another and compiled no graph"
            self._fallback.run_eagerly("CC101", reason)

    def _leave_frozen(self, reason: str) -> None:
        """Run the target eagerly, because torch executed a part of its Python code only while it traced the target."""
        if self._fallback.settings.verify == "raise":
            message = f"target {self.key.target!r} in the {self.key.phase} phase: {reason}"
            raise CompileError(with_code("CC306", message))
        self._fallback.run_eagerly("CC306", reason)

    def _check_state(self, changes: StateChanges, member: Target, *, traced: bool) -> None:
        """Run the target eagerly if a generator or a count that changes in eager calls did not change in this call."""
        frozen = self.observed.changing_state.frozen_in(changes.call_ended(member.module))
        if traced:  # the trace itself may have changed the state
            return
        self._state_changes = None
        if not frozen:
            return
        self._leave_frozen(
            f"{', '.join(frozen)} changed in its eager calls, but not in a compiled call: torch counted only while it "
            "traced, or draws from another generator"
        )

    def _runs_eagerly(self, outer: TargetCall | None, args: Any, kwargs: Any) -> bool:
        if outer is not None and outer.nested_calls_eager:
            return True
        self.called = True
        # An activation checkpoint must recompute with the same code.
        if self.gave_up_regions and self._regions is not None and not _torch.autograd.saves_through_hooks():
            self._regions, self._fallback.has_regions = None, False
            self._uncompilable.clear()
            self.free_compiled()
        if _torch.dynamo.is_transformed():
            self._warn_of_transform()
            return True
        if not self.ran and self.observed.gradients_differentiated:
            self._leave_eager()
        self.ran = True
        # An activation checkpoint must run the same code in the forward pass and in the backward pass. Within a
        # checkpoint, the compiled function therefore continues, and runs graphs that differ from eager eagerly.
        if self._fallback.runs_eagerly and not _torch.autograd.saves_through_hooks():
            return True
        return bool(self._uncompilable) and signature(args, kwargs) in self._uncompilable

    def _leave_eager(self) -> None:
        """Leave a target eager if the eager steps differentiate its gradients, which compiled graphs do not support."""
        if self._fallback.settings.on_error == "eager":
            self._fallback.run_eagerly(
                "CC303",
                "the eager steps differentiate its gradients (create_graph=True), and torch cannot differentiate the "
                "backward pass of a compiled graph",
            )

    def _current_function(self) -> Callable[..., Any]:
        """Return the function of torch.compile, after a check for changes that torch's guards do not notice."""
        if self._frozen:
            self._refreeze_if_weights_changed()
        if self._hooks_seen != _torch.dynamo.hooks_registered():
            self._look_for_hooks()
        return self._compiled or self._compile()

    def _stance(self, member: Target, args: Any, kwargs: Any) -> str | None:
        policy = self._shapes[member]
        if self.on_trial:
            # The first call of a candidate may have unusual shapes, for example in the last batch of an epoch.
            policy.allow(args, kwargs)
        return policy.stance(args, kwargs)

    def _call_under(self, stance: str, compiled: Callable[..., Any], member: Target, args: Any, kwargs: Any) -> Any:
        """Call the member with new shapes, without a new compile."""
        try:
            with torch.compiler.set_stance(stance):  # type: ignore[arg-type]
                return compiled(member.module, *args, **kwargs)
        except RuntimeError as error:
            if stance not in str(error):
                raise
        target, phase = self.key[:2]
        message = (
            f"target {target!r} was called in the {phase} phase with inputs of the shapes {shapes(args, kwargs)}, "
            "for which it is not compiled, and new_shapes='raise'. Set 'recompile' or 'eager' to allow new shapes"
        )
        raise CompileError(with_code("CC107", message))

    def trace_begins(self, args: Any, kwargs: Any) -> None:
        """Mark the input dimensions that vary, and set Dynamo's settings for our compiles until the call ends."""
        self.observed.record(args, kwargs)
        if self.observed.changing_state.names and self._fallback.settings.verify != "off":
            self._state_changes = StateChanges()
        if self._config.dynamic is None:
            self._while_tracing.enter_context(self.observed.marked(args, kwargs))
        self._while_tracing.enter_context(_torch.dynamo.without_weak_references())
        self._while_tracing.enter_context(_torch.dynamo.without_odd_gradients())
        self._while_tracing.enter_context(_torch.regions.strict_comparison())
        if self._fallback.settings.verify != "off":
            self._frozen_draws = self._while_tracing.enter_context(_torch.dynamo.frames_with_frozen_draws())
        if self._regions is not None:
            self._while_tracing.enter_context(_torch.regions.with_constant_floats())

    def _call_after_failure(self, member: Target, failure: Exception, args: Any, kwargs: Any) -> Any:
        # If the user's code raised the error, the eager call raises it again with the user's traceback.
        result = member.eager(*args, **kwargs)
        if any(isinstance(cause, TargetIsEagerError) for cause in _torch.dynamo.causes(failure)):
            return result
        if self._regions is not None:
            self._uncompilable.add(signature(args, kwargs))  # runs eagerly until the whole target is compiled
            self._fallback.region_failure = describe(failure)
            return result
        if self._fallback.settings.on_error == "raise":
            raise self._fallback.as_compile_error(failure) from failure
        self._uncompilable.add(signature(args, kwargs))
        self._fallback.compiler_failed(failure)
        return result

    def _give_up_regions(self, reason: str) -> None:
        """Compile the whole target from the next call on."""
        self._fallback.region_failure, self.gave_up_regions = None, True
        target, phase = self.key[:2]
        message = (
            f"target {target!r} is compiled whole in the {phase} phase, because torch cannot compile its repeated "
            f"blocks as regions of one graph: {in_one_line(reason)}. To compile only the blocks, name them in "
            "targets=[...], as in targets=['encoder.layers.*']"
        )
        self._recorder.record("whole_target", self.key, reason=reason)
        self._fallback.warn_after_call("CC121", message)

    def _graphs_were_compiled(self, member: Target, args: Any, kwargs: Any) -> None:
        if len(self._members) > 1:
            looks = signature(args, kwargs), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._compiled_of.setdefault(looks, set()).add(member)
        self._raise_recompile_limit()

    def _warn_of_transform(self) -> None:
        target, phase = self.key[:2]
        message = (
            f"target {target!r} runs eagerly in the {phase} phase when it is called under a transform of torch.func or "
            "forward-mode AD: torch compiles a transform together with the function that it transforms. Name the "
            "method that contains both as the target"
        )
        self._warn.warn("CC108", message, about=(target, phase))  # also in a trial, because it affects all candidates

    # ------------------------------------------------------------------------------------------ torch.compile

    def _compile(self) -> Callable[..., Any]:
        """Call torch.compile. The returned function compiles when it is called."""
        name = re.sub(r"\W", "_", f"{self.key.target}_{self.key.phase}")
        compiled = _torch.dynamo.compile_function(
            _torch.dynamo.function_with_own_cache(_calling(self._members[0].function), name),
            self._backend.compile,
            fullgraph=self._config.fullgraph,
            dynamic=self._config.dynamic,
        )
        if self._regions is not None:
            compiled = self._regions.around(compiled)
        if self._guards_hooks:
            compiled = _torch.dynamo.with_dynamo_settings(compiled, skip_nnmodule_hook_guards=lambda _: False)
        ddp_is_configured = self.key.phase == "train" and _torch.distributed.ddp_treatment_is_chosen()
        if torch.distributed.is_available() and not ddp_is_configured:
            # Compile whole graphs, which were faster than DDP's buckets (docs/how_to/several_gpus.md).
            compiled = _torch.distributed.outside_ddp(compiled)
        self._compiled, self._raises_limit = compiled, False
        self._raise_recompile_limit()
        return self._compiled

    def _raise_recompile_limit(self) -> None:
        """Raise torch's recompile limit if it is too low. Check this first, because setting it takes 10 µs per call."""
        if self._compiled is not None and not self._raises_limit and self._limit_factor > 1:
            self._raises_limit = True
            self._compiled = _torch.dynamo.with_dynamo_settings(
                self._compiled, recompile_limit=lambda limit: self._limit_factor * limit
            )

    @property
    def _limit_factor(self) -> int:
        # Before torch 2.13, the graphs of both phases share the user's code object after a graph break.
        phases = 2 if _torch.dynamo.SHARES_RECOMPILE_LIMIT and self.key in self._recorder.with_graph_breaks else 1
        # torch compiles blocks that differ separately.
        many = len(self._members) > 1 and self._backend.graphs >= _torch.dynamo.recompile_limit()
        return phases * (len(self._members) if many else 1)

    def _look_for_hooks(self) -> None:
        """Compile again after the first hooks were registered, because by default torch does not notice them.

        Only modules with hooks get guards on hooks, because guards on hooks make the checks of each call a sixth
        slower.
        """
        self._hooks_seen = _torch.dynamo.hooks_registered()
        if not self._guards_hooks and any(member.has_hooks for member in self._members):
            self._guards_hooks = True
            self._compile()

    # ------------------------------------------------------------------------------------------ weights and memory

    def invalidate_weights(self) -> None:
        """Compare all weights at the next call. A stage begins, and a callback may have swapped the weights."""
        self._weights_are_suspect = True

    def _refreeze_if_weights_changed(self) -> None:
        if self._weights.changed(thorough=self._weights_are_suspect) and self._backend.graphs:
            self.free_compiled()  # because each set of frozen weights would stay in memory
        self._weights_are_suspect = False

    def free_compiled(self) -> None:
        """Free the compiled code with its frozen weights. The next call compiles again."""
        self._compiled = None
        self._backend.free()

    @property
    def backend(self) -> GraphBackend:
        """The backend, which has no reference to the module."""
        return self._backend

    # ------------------------------------------------------------------------------------------ settings and results

    def allow_shapes(self, args: Any, kwargs: Any) -> None:
        """Allow calls with these shapes to compile, with any ``new_shapes``."""
        for policy in self._shapes.values():
            policy.allow(args, kwargs)

    @property
    def on_trial(self) -> bool:
        """Whether the config is a candidate that a `Tune` has not chosen yet."""
        return self._fallback.settings.on_trial

    def end_trial(self, settings: TargetSettings) -> None:
        """End the trial. The next call issues the warnings that waited for the end of the trial."""
        self._fallback.settings = settings

    @property
    def blocks_differ(self) -> bool:
        """Whether torch compiled each repeated block separately instead of sharing a graph."""
        if self._regions is not None:
            return self._backend.graphs > 0 and not self._backend.shares_regions
        return self._shares_as_asked and any(len(found) == len(self._members) for found in self._compiled_of.values())


def _calling(function: Callable[..., Any]) -> Any:
    # This function is in our file, because Dynamo skips frames of torch.nn, such as _call_impl (2.11 and 2.13). The
    # module is an argument, so that its weights are inputs of the graph and equal modules share the graph.
    def compiled_target(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return compiled_target
