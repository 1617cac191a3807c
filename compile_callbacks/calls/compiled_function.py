"""`CompiledFunction`: the function of ``torch.compile`` for a `CompiledTarget`, and how it treats Dynamo's frames."""

from __future__ import annotations

import contextlib
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError
from compile_callbacks.calls.observed_calls import DIFFERENTIATED, KEPT, ObservedCalls
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.graphs.backend import GraphBackend
from compile_callbacks.graphs.target_log import TargetLog
from compile_callbacks.profiling.recorder import CallInProgress
from compile_callbacks.targets.target import Target

RECOMPILE_AFTER, OF_LAST_CALLS = 8, 100
"""A target is compiled again when this number of its last calls did not fit its code. Until then, such calls run
eagerly, because a recompile takes as long as hundreds or thousands of eager steps."""

_PACKAGE, _TRACED = f"{Path(__file__).parents[1]}/", "dispatcher.py"
"""If torch runs a frame eagerly that calls another target, it traces the dispatcher, which then calls the module. If
this fails, the other target runs compiled, and torch must not trace that."""

_DIFFERENTIATED = (
    "the eager steps differentiate its gradients (create_graph=True), and torch cannot differentiate the backward pass "
    "of a compiled graph"
)


class CompiledFunction:
    """The function of ``torch.compile`` for a target. It takes the module as its first argument.

    A call that fails the guards of all compiled graphs runs eagerly. If `recompile_after` of the last `OF_LAST_CALLS`
    calls failed them, torch compiles again. For repeated blocks, torch's guards decide which need separate graphs.
    """

    _compiles: ClassVar = 0  # the number of functions that this process has got from torch.compile

    def __init__(
        self, target: Target, config: InductorConfig, backend: GraphBackend, log: TargetLog, observed: ObservedCalls
    ) -> None:
        self._target, self._config, self._backend, self._log, self._observed = target, config, backend, log, observed
        self.calls = 0
        self.recompile_after: float = RECOMPILE_AFTER
        # What `hooks_registered` returned at the last look for hooks; None if the code has guards on hooks.
        self.hooks_seen: int | None = -1
        # For the code of each compiled frame, the number of resets of torch before, beginning with the target's own;
        # None if the compiler failed on the frame. It then runs eagerly if no graph fits.
        self.frames: dict[types.CodeType, int | None] = {}
        self.why_no_graph: str | None = None  # what torch told when it last traced the target's own frame
        self._static_call: int | None = None  # the number of the call that compiles for one set of sizes only
        self._misses: deque[int] = deque(maxlen=RECOMPILE_AFTER)  # the numbers of the last calls that no graph fitted

    def get(self) -> Callable[..., Any]:
        """Return the function, after a look for hooks. The function compiles when it is called.

        By default, torch does not notice the first hooks. Only modules with hooks get guards on hooks, because such
        guards make the checks of each call a sixth slower.
        """
        if self.hooks_seen not in (None, _torch.dynamo.hooks_registered()):
            has_hooks = (_torch.dynamo.has_call_hooks(m.module, own=m.method is None) for m in self._target.members)
            self.hooks_seen = _torch.dynamo.hooks_registered()
            if any(has_hooks):
                self.hooks_seen = self._backend.compiled_call = None
        return self._backend.compiled_call or self._compile()

    def _compile(self) -> Callable[..., Any]:
        target, phase = self._log.key[:2]
        name = re.sub(r"\W", "_", f"{target}_{phase}")
        function = _torch.torch_2_11.function_with_own_cache(_calling(self._target.members[0].function), name)
        self.frames = {function.__code__: -1}
        CompiledFunction._compiles += 1
        compile_graph: Any = weakref.WeakMethod(self._backend.compile)
        arguments: dict[str, Any] = {"fullgraph": self._config.fullgraph, "dynamic": self._config.dynamic}

        # An object of its own, because torch older than 2.13 runs freed code behind a graph break again if its backend
        # is equal. It must not keep the module alive, because torch never frees it.
        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            return compile_graph()(graph, inputs)

        try:
            compiled = _torch.dynamo.compile_function(function, backend, self._convert, **arguments)
        except _torch.ports.MissingPortError as error:
            self._log.warn_later("CC309", str(error), about="frames")
            compiled = torch.compile(function, backend=backend, **arguments)
        self._backend.compiled_call = compiled
        return compiled

    # ------------------------------------------------------------------------------------------ a frame

    def _convert(self, frame: _torch.dynamo.Frame) -> Any:
        """Let Dynamo trace a frame before its code runs, and decide what happens if it fails.

        If it fails on the target's own frame, none of the user's code has run, and the target is called eagerly. A
        later frame runs eagerly alone, so that nothing runs twice.
        """
        log, recorder, is_own = self._log, self._log.recorder, frame.code is next(iter(self.frames))
        if frame.code.co_filename.startswith(_PACKAGE) and not (is_own or frame.code.co_filename.endswith(_TRACED)):
            return _torch.dynamo.skip_frame()
        resets = self.frames.get(frame.code, -1)
        if resets is None:
            recorder.part_runs_eagerly()
        if resets is None or (resets == recorder.executions.resets and self._runs_miss_eagerly()):
            return _torch.dynamo.run_frame_eagerly()
        call = log.eventful_call()
        try:
            with self._tracing(call):
                result = frame.convert()
            if (why_skipped := _torch.dynamo.skipped(result)) is None:
                self.frames[frame.code] = recorder.executions.resets
            self.why_no_graph = why_skipped if is_own else self.why_no_graph
            if is_own and self._config.fullgraph and why_skipped:
                raise CompileError(f"fullgraph=True, but torch compiles nothing of the target: {why_skipped}")
            return result
        except Exception as error:
            if frame.is_graph_break(error):
                self._graph_breaks(error, is_own)
                raise
            call.failure, call.nothing_ran = error, is_own
            call.failed_frames += (frame.code,)
            if is_own:
                raise
            recorder.part_runs_eagerly()
            return _torch.dynamo.run_frame_eagerly()

    def _graph_breaks(self, error: Exception, is_own: bool) -> None:
        """Record an error after which torch runs a frame eagerly, and compiles the frames beneath."""
        if "recompile limit exceeded" in str(error):
            self._log.recorder.limit_reached(self._log.key)
        elif is_own:  # torch skips the frame, and does not announce a graph break
            self._log.recorder.record("graph_break", self._log.key, reason=str(error))
        self.why_no_graph = str(error) if is_own else self.why_no_graph

    def _runs_miss_eagerly(self) -> bool:
        """Return whether a frame of the running call runs eagerly, because none of its graphs fits the call."""
        call, first = self._log.recorder.calling.current, self._target.members[0]
        if call is None or call.traced or self._backend.has_collective or self._compiles_each_miss():
            return False
        # An activation checkpoint must recompute with the code of the forward pass. A reentrant one calls a module that
        # trains without grad, and calls it again in the backward pass.
        trains_without_grad = first.module.training and not torch.is_grad_enabled()
        if trains_without_grad or _torch.autograd.saves_through_hooks() or _torch.autograd.in_backward():
            return False
        if not call.missed:  # a call counts once, with any number of frames
            self._observed.record(call.args, call.kwargs)
            self._misses.append(self.calls)
            if len(self._misses) >= self.recompile_after and self.calls - self._misses[0] < OF_LAST_CALLS:
                self._misses.clear()
                if not self._log.settings.static or self._observed.later_sets <= 2:
                    return False
                self._log.give_up_cuda_graphs("the calls have three sets of shapes or more")
            call.missed = call.partly_eager = True
        return True

    def _compiles_each_miss(self) -> bool:
        members = self._target.members
        return (
            self._config.fullgraph  # torch 2.15 raises "found no compiled frames" if the call runs eagerly
            or len(members) > 1  # equal blocks share the function, and may need a graph each
            or any(member.sharded for member in members)
            # Ranks whose code is not the same may communicate in another order. See also `has_collective`.
            or any(isinstance(part, nn.SyncBatchNorm) for part in members[0].module.modules())
        )

    @contextlib.contextmanager
    def _tracing(self, call: CallInProgress) -> Iterator[None]:
        """Mark the input dimensions that vary, and set Dynamo's settings for our compiles."""
        if not call.traced:
            call.traced = True
            self._observed.record(call.args, call.kwargs)
        log, facts, settings, graphs = self._log, self._observed.facts, dict(self._config.dynamo), self._backend.graphs
        if DIFFERENTIATED in facts and not graphs:
            if log.settings.on_error == "raise":
                raise CompileError(_DIFFERENTIATED)
            raise log.leave_eager("CC303", _DIFFERENTIATED)
        self._backend.keeps_graph = log.settings.keeps_graph or KEPT in facts
        with contextlib.ExitStack() as stack:
            if self._config.dynamic is None:
                if not log.settings.static:
                    self._observed.mark(call.args, call.kwargs, stack)
                if self._compiles_static(call):
                    self._static_call, settings["automatic_dynamic_shapes"] = self.calls, False
                if len(self._target.members) == 1:
                    # An integer attribute that changes, such as a count of the calls, becomes an input at a recompile.
                    settings.setdefault("allow_unspec_int_on_nn_module", True)
            draws = stack.enter_context(
                _torch.dynamo.trace_settings(
                    settings,
                    limit_factor=self._limit_factor(),
                    guards_hooks=self.hooks_seen is None,
                    frozen=self._backend.frozen,
                )
            )
            try:
                yield
            except Exception:
                self._backend.graphs = graphs  # no call uses what was compiled before an error, such as at the guards
                raise
        call.constant_draws += tuple(draws)

    def _compiles_static(self, call: CallInProgress) -> bool:
        """Return whether a compile is static, although torch has seen other sizes, also in an earlier run."""
        if self._log.settings.static and self._observed.later_sets == 2:
            return True
        is_second = self._log.settings.static or self._observed.is_second_set(call.args, call.kwargs)
        return is_second and self._static_call in (None, self.calls)  # once, because it also makes numbers static

    def _limit_factor(self) -> int:
        """Return by how much torch's recompile limit is too low: torch compiles blocks that differ separately."""
        # Before torch 2.13, all our functions share the user's code object after a graph break, also freed ones.
        shares = _torch.torch_2_11.IS_OLDER_THAN_2_13 and self._log.recorder.events_of(self._log.key, "graph_break")
        return len(self._target.members) * (CompiledFunction._compiles if shares else 1)


def _calling(function: Callable[..., Any]) -> Any:
    # This function is in our file, because Dynamo skips frames of torch.nn, such as _call_impl (2.11 and 2.13). The
    # module is an argument, so that its weights are inputs of the graph and equal modules share the graph.
    def compiled_target(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return compiled_target
