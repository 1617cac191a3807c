"""`CompiledTarget`: one target, compiled with the config of one phase. A `Dispatcher` calls it."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileError, WarnOnce
from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import shapes, signature
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder, TargetCall
from compile_callbacks.runtime.fallback import EagerFallback
from compile_callbacks.runtime.freezing import WeightWatch
from compile_callbacks.runtime.graph_backend import GraphBackend
from compile_callbacks.runtime.repeated import Compiled, RepeatedBlocks
from compile_callbacks.runtime.snapshot import Snapshot
from compile_callbacks.runtime.target import Target
from compile_callbacks.runtime.target_settings import ShapePolicy, TargetSettings

if TYPE_CHECKING:
    from compile_callbacks.folding.folded import FoldedGraph


class CompiledTarget:
    """A target that is compiled for a phase.

    Each has a separate `GraphBackend`, so that the target and the phase of every compile are known.

    Repeated blocks are one target: the compiled function takes the block as an argument. Torch's guards decide which
    blocks need separate graphs.

    Args:
        target: The target.
        phase: The phase.
        config: The config.
        passes: Graph passes that run before those of ``config``.
        recorder: Records the compile events.
        isolation: Shared by the compiled targets of a switch.
        warn: Warns once about each subject.
        settings: The settings other than the config.
        frozen: Freeze the weights. They are frozen again when they change; see `WeightWatch` and `invalidate_weights`.
        name: The name of the candidate, if the config is one of several.
    """

    def __init__(
        self,
        target: Compiled,
        phase: Phase,
        config: InductorConfig,
        *,
        passes: Sequence[Any] = (),
        recorder: CompileRecorder,
        isolation: Isolation | None = None,
        warn: WarnOnce | None = None,
        settings: TargetSettings | None = None,
        frozen: bool = False,
        name: str | None = None,
    ) -> None:
        settings = settings or TargetSettings()
        self.key = CompileKey(target.name, phase, frozen, name)
        self.called = False
        """Whether the target was called in the phase."""
        self.ran = False
        """Whether a call ran the compiled function, or was to run it."""
        self._config = config
        self._members = target.members
        self._shares_as_asked = isinstance(target, RepeatedBlocks) and target.asked_for
        self._one_limit = len(self._members) == 1 and not _torch.dynamo.SHARES_RECOMPILE_LIMIT
        self._recorder = recorder
        self._isolation = isolation or Isolation()
        self._warn = warn or WarnOnce()
        self._fallback = EagerFallback(self.key, recorder, settings, self._warn)
        self._compiler = GraphBackend(target, self.key, config, passes, recorder=recorder, fallback=self._fallback)
        # One for each block: the inputs of the first one differ from those of the others (requires_grad).
        self._shapes = {member: ShapePolicy(settings.new_shapes) for member in self._members}
        self._limits_shapes = settings.new_shapes != "recompile"
        self._uncompilable: set[Any] = set()
        self._guards_hooks = False
        self._hooks_seen = -1
        self._weights = WeightWatch(self._members[0].module)  # frozen weights: of a single member
        self._weights_are_suspect = True
        self._baked_in = False
        self._while_tracing = contextlib.ExitStack()
        self._compiled_of: dict[Any, set[Target]] = {}
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled target; of repeated blocks, the first one."""
        return self._call(self._members[0], *args, **kwargs)

    def on(self, member: Target) -> Callable[..., Any]:
        """Return the compiled call of one member."""
        return functools.partial(self._call, member)

    def _call_transformed(self, member: Target, args: Any, kwargs: Any) -> Any:
        """Call the member eagerly under a transform. Torch would too, but would never compile the code again."""
        target, phase = self.key[:2]
        message = (
            f"calls of target {target!r} under a transform of torch.func or forward-mode AD run eagerly in the {phase} "
            "phase: torch compiles a transform together with what it transforms; name the method that holds both as "
            "the target"
        )
        self._warn((target, phase, "transform"), message)  # also during a trial, because it is true of all candidates
        return member.eager(*args, **kwargs)

    def _call(self, member: Target, /, *args: Any, **kwargs: Any) -> Any:
        if self._isolation.eager:
            return member.eager(*args, **kwargs)
        self.called = True
        if _torch.dynamo.is_transformed():
            return self._call_transformed(member, args, kwargs)
        self.ran = True
        # An activation checkpoint must run the same code in the forward pass and in the backward pass. Within one, the
        # compiled function continues to run: it executes the graphs that differ eagerly.
        if self._fallback.active and not _torch.autograd.saves_through_hooks():
            return member.eager(*args, **kwargs)
        if self.key.frozen:
            self._refreeze_if_weights_changed()
        if self._hooks_seen != _torch.dynamo.hooks_registered():
            self._look_for_hooks()
        if self._uncompilable and signature(args, kwargs) in self._uncompilable:
            return member.eager(*args, **kwargs)
        self._recorder.listen_after_reset()
        before_compile: list[Snapshot] = []
        failure, graphs_before = None, self._compiler.graphs
        calling = self._recorder.calling
        outer = calling.current
        calling.current = TargetCall(self.key, functools.partial(self._remember, member, before_compile))
        try:
            stance = self._stance(member, args, kwargs) if self._limits_shapes else None
            if stance is not None:
                result = self._call_under(stance, member, args, kwargs)
            elif self._one_limit or self._limit_factor == 1:
                result = self._compiled(member.module, *args, **kwargs)
            else:
                result = self._compiled_beyond_limit(member.module, *args, **kwargs)
        except Exception as error:
            if not _torch.dynamo.raised_while_compiling(error):
                raise
            failure = error
        finally:
            calling.current = outer
            if before_compile:
                self._while_tracing.close()
        if failure is not None:
            for snapshot in before_compile:
                snapshot.restore()
            result = self._without_compiler(member, failure, args, kwargs)
        if self._compiler.graphs > graphs_before and len(self._members) > 1:
            looks = signature(args, kwargs), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._compiled_of.setdefault(looks, set()).add(member)
        self._fallback.issue_warnings()
        return result

    @property
    def blocks_differ(self) -> bool:
        """Whether each repeated block was compiled separately, although they were to share a graph."""
        return self._shares_as_asked and any(len(found) == len(self._members) for found in self._compiled_of.values())

    def _stance(self, member: Target, args: Any, kwargs: Any) -> str | None:
        policy = self._shapes[member]
        if self.on_trial:
            # The first call of a candidate may have unusual shapes, in the last batch of an epoch for example.
            policy.allow(args, kwargs)
        return policy.stance(args, kwargs)

    def invalidate_weights(self) -> None:
        """Compare all weights at the next call, because a stage begins, and weights may have been swapped for it."""
        self._weights_are_suspect = True
        for graph in self.folded_graphs():
            graph.invalidate_weights()

    def free_folded_weights(self) -> None:
        """Free the memory of folded weights until the next call."""
        self._compiler.free_folded()

    @property
    def compiler(self) -> GraphBackend:
        """The backend; it holds no reference to the module."""
        return self._compiler

    def folded_graphs(self) -> list[FoldedGraph]:
        """The folded graphs that are still in use."""
        return self._compiler.folded_graphs()

    def free_compiled(self) -> None:
        """Free the compiled code with its folded and frozen weights. The next call compiles again."""
        self._compiled = self._compiled_beyond_limit = self._compile_and_call
        self._baked_in = False
        self._compiler.free()

    def allow_shapes(self, args: Any, kwargs: Any) -> None:
        """Let calls with inputs of these shapes compile, whatever ``new_shapes`` is."""
        for policy in self._shapes.values():
            policy.allow(args, kwargs)

    @property
    def on_trial(self) -> bool:
        """Whether the settings are candidates of a `Tune`."""
        return self._fallback.settings.on_trial

    def end_trial(self, settings: TargetSettings) -> None:
        """End the trial. Warnings that were held back are given at the next call."""
        self._fallback.settings = settings

    def _refreeze_if_weights_changed(self) -> None:
        if self._weights.changed(thorough=self._weights_are_suspect) and self._baked_in:
            self.free_compiled()  # otherwise every set of frozen weights would stay in memory
        self._weights_are_suspect, self._baked_in = False, True

    @property
    def _limit_factor(self) -> int:
        """The factor by which torch's recompile limit is raised."""
        # After a graph break, the graphs of both phases belong to the user's code object.
        phases = 2 if _torch.dynamo.SHARES_RECOMPILE_LIMIT and self.key in self._recorder.with_graph_breaks else 1
        # Blocks that differ are compiled separately. Raising the limit takes 10 µs a call, so not before it is reached.
        many = (
            len(self._members) > 1
            and self._compiler.graphs > 1
            and self._compiler.graphs >= _torch.dynamo.recompile_limit()
        )
        return phases * (len(self._members) if many else 1)

    def _call_under(self, stance: str, member: Target, args: Any, kwargs: Any) -> Any:
        """Call the member with new shapes, without a new compile."""
        try:
            # Without this, the stance would apply to a target inside this one, whose first call could then not compile.
            with self._isolation.uncompiled(), torch.compiler.set_stance(stance):  # type: ignore[arg-type]
                return self._compiled_beyond_limit(member.module, *args, **kwargs)
        except RuntimeError as error:
            if stance not in str(error):
                raise
        target, phase = self.key[:2]
        message = (
            f"target {target!r} was called in the {phase} phase with inputs of the shapes {shapes((args, kwargs))}, "
            "for which it is not compiled, and new_shapes='raise'; give 'recompile' or 'eager' to admit them"
        )
        raise CompileError(message)

    def _compile(self) -> None:
        name = re.sub(r"\W", "_", f"{self.key.target}_{self.key.phase}")
        compiled = _torch.dynamo.compile_function(
            _torch.dynamo.function_with_own_cache(_calling(self._members[0].function), name),
            self._compiler.compile,
            fullgraph=self._config.fullgraph,
            dynamic=self._config.dynamic,
        )
        if self._guards_hooks:
            compiled = _torch.dynamo.with_dynamo_settings(compiled, skip_nnmodule_hook_guards=lambda _: False)
        as_chosen = self.key.phase == "train" and _torch.distributed.ddp_treatment_is_chosen()
        if torch.distributed.is_available() and not as_chosen:
            compiled = _torch.distributed.outside_ddp(compiled)  # whole graphs were faster (docs/many_gpus.md)
        self._compiled = compiled
        self._compiled_beyond_limit = _torch.dynamo.with_dynamo_settings(
            compiled, recompile_limit=lambda limit: self._limit_factor * limit
        )

    def _compile_and_call(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        self._compile()
        return self._compiled(module, *args, **kwargs)

    def _look_for_hooks(self) -> None:
        """Compile again after the first hooks were registered: by default, torch does not notice them.

        Guards on hooks would, but they make the guards of each call a sixth slower. So only modules with hooks have
        them; the guards also notice that a hook is removed.
        """
        self._hooks_seen = _torch.dynamo.hooks_registered()
        if not self._guards_hooks and any(member.has_hooks for member in self._members):
            self._guards_hooks = True
            self._compile()

    def _remember(self, member: Target, before_compile: list[Snapshot]) -> None:
        """Save the module's state before Dynamo traces, to restore it if a compile fails after a graph break."""
        if not before_compile:
            before_compile.append(Snapshot(member.module))
            self._while_tracing.enter_context(_torch.dynamo.without_weak_references())
            self._while_tracing.enter_context(_torch.dynamo.without_odd_gradients())

    def _without_compiler(self, member: Target, failure: BaseException, args: Any, kwargs: Any) -> Any:
        """Call the member eagerly, because its compile failed."""
        # If the error is the user's, the eager call raises it again with the user's traceback.
        result = member.eager(*args, **kwargs)
        if self._fallback.settings.on_error == "raise":
            raise self._fallback.as_compile_error(failure) from failure
        self._uncompilable.add(signature(args, kwargs))
        self._fallback.compiler_failed(failure)
        return result


class Isolation:
    """Makes all compiled targets of a switch run eagerly.

    Attributes:
        eager: Whether they run eagerly now.
    """

    def __init__(self) -> None:
        self.eager = False

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run all compiled targets eagerly in this context."""
        before, self.eager = self.eager, True
        try:
            yield
        finally:
            self.eager = before


def _calling(function: Callable[..., Any]) -> Any:
    # A function of this file, because Dynamo skips frames of torch.nn (2.11 and 2.13): it would compile nothing of
    # torch's _call_impl. The module is an argument, so that its weights are inputs of the graph, and modules of the
    # same structure share it.
    def compiled_target(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return compiled_target
