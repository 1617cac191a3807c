"""One target compiled with one phase's settings, and called in its place."""

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
from compile_callbacks.profiling.compile_events import CompileRecorder, Owner, TargetCall
from compile_callbacks.runtime.fallback import Fallback, describe
from compile_callbacks.runtime.freezing import WeightWatch
from compile_callbacks.runtime.graph_backend import GraphCompiler
from compile_callbacks.runtime.snapshot import Snapshot
from compile_callbacks.runtime.target_settings import RegionSettings, ShapePolicy
from compile_callbacks.runtime.targets import Compiled, RepeatedBlocks, Target

if TYPE_CHECKING:
    from compile_callbacks.folding.folded import FoldedGraph


class CompiledRegion:
    """A target compiled for a phase; called in place of the target.

    Its graphs are compiled by a `GraphCompiler` of its own, so that every compile is known by target and phase.

    Blocks that are repeated share a region: one function, which is given the block, is compiled for all of them, and
    torch's guards tell where a block needs a graph of its own.

    Args:
        target: What is compiled.
        phase: The phase it is compiled for.
        config: The settings.
        passes: Graph passes to run before those of ``config``.
        recorder: Told of everything that happens.
        isolation: Shared with the regions of the same switch.
        warn: Warns of each subject once.
        settings: What the region does beside compiling.
        frozen: Bake the weights in, and anew when they changed; see `WeightWatch` and `suspect_weights`.
        name: What the settings are called, where the phase has several.
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
        settings: RegionSettings | None = None,
        frozen: bool = False,
        name: str | None = None,
    ) -> None:
        settings = settings or RegionSettings()
        self.owner = Owner(target.name, phase, frozen, name)
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
        self._fallback = Fallback(self.owner, recorder, settings, self._warn)
        self._compiler = GraphCompiler(target, self.owner, config, passes, recorder=recorder, fallback=self._fallback)
        # Of each block: what calls the first of them differs from what calls the others (a gradient to pass on).
        self._shapes = {member: ShapePolicy(settings.new_shapes) for member in self._members}
        self._limits_shapes = settings.new_shapes != "recompile"
        self._uncompilable: set[Any] = set()
        self._guards_hooks = False
        self._hooks_seen = -1
        self._weights = WeightWatch(self._members[0].module)  # baked in where there is one member alone
        self._suspects_weights = True
        self._baked_in = False
        self._while_tracing = contextlib.ExitStack()
        self._compiled_of: dict[Any, set[Target]] = {}
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, compiled for the phase; of repeated blocks the first."""
        return self._call(self._members[0], *args, **kwargs)

    def on(self, member: Target) -> Callable[..., Any]:
        """What calls one of the target's members, compiled for the phase."""
        return functools.partial(self._call, member)

    def _call_transformed(self, member: Target, args: Any, kwargs: Any) -> Any:
        """A call under a transform: torch would run it eagerly, and then compile no other call of the code either."""
        target, phase = self.owner[:2]
        message = (
            f"calls of target {target!r} under a transform of torch.func or forward-mode AD run eagerly in the {phase} "
            "phase: torch compiles a transform together with what it transforms; name the method that holds both as "
            "the target"
        )
        self._warn((target, phase, "transform"), message)  # also of a candidate: it holds for all
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
        if self._fallback.gave_up and not _torch.autograd.saves_through_hooks():
            return member.eager(*args, **kwargs)
        if self.owner.frozen:
            self._refreeze_if_weights_changed()
        if self._hooks_seen != _torch.dynamo.hooks_registered():
            self._look_for_hooks()
        if self._uncompilable and signature(args, kwargs) in self._uncompilable:
            return member.eager(*args, **kwargs)
        self._recorder.listen_again()
        before_compile: list[Snapshot] = []
        failure, graphs_before = None, self._compiler.graphs
        calling = self._recorder.calling
        outer = calling.current
        calling.current = TargetCall(self.owner, functools.partial(self._remember, member, before_compile))
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
        self._fallback.call_is_over()
        return result

    @property
    def blocks_differ(self) -> bool:
        """Whether each of the repeated blocks that were to share a graph was compiled separately."""
        return self._shares_as_asked and any(len(found) == len(self._members) for found in self._compiled_of.values())

    def _stance(self, member: Target, args: Any, kwargs: Any) -> str | None:
        policy = self._shapes[member]
        if self.on_trial:
            # The first call of a candidate may be the odd one of a run, the last batch of an epoch for example.
            policy.admit(args, kwargs)
        return policy.stance(args, kwargs)

    def suspect_weights(self) -> None:
        """Believe no weight before the next call to be what it was: a stage begins, and may have swapped them."""
        self._suspects_weights = True
        for graph in self.folded_graphs():
            graph.suspect_weights()

    def free_folded_weights(self) -> None:
        """Give back the memory that folded weights take, until the next call."""
        self._compiler.free_folded()

    @property
    def compiler(self) -> GraphCompiler:
        """What compiles the graphs; it does not keep the module."""
        return self._compiler

    def folded_graphs(self) -> list[FoldedGraph]:
        """The folded graphs that are still in use."""
        return self._compiler.folded_graphs()

    def free_compiled(self) -> None:
        """Give back what compiled code takes, weights that are folded or baked in among it; the next call compiles."""
        self._compiled = self._compiled_beyond_limit = self._compile_and_call
        self._baked_in = False
        self._compiler.free()

    def admit_shapes(self, args: Any, kwargs: Any) -> None:
        """Have calls with inputs of these shapes compile, whatever new shapes do."""
        for policy in self._shapes.values():
            policy.admit(args, kwargs)

    @property
    def on_trial(self) -> bool:
        """Whether the settings are candidates of a `Tune`."""
        return self._fallback.settings.on_trial

    def choose(self, settings: RegionSettings) -> None:
        """The settings are on trial no more; what there was to say meanwhile is said at the next call."""
        self._fallback.settings = settings

    def _refreeze_if_weights_changed(self) -> None:
        if self._weights.changed(thorough=self._suspects_weights) and self._baked_in:
            self.free_compiled()  # else every set of weights that was ever baked in would stay
        self._suspects_weights, self._baked_in = False, True

    @property
    def _limit_factor(self) -> int:
        """How many times as many graphs as torch's recompile limit allows for the code of one target."""
        # Behind a break, both phases' graphs are on the user's code.
        phases = 2 if _torch.dynamo.SHARES_RECOMPILE_LIMIT and self.owner in self._recorder.broken else 1
        # Blocks that differ are compiled each; below torch's limit there is nothing to lift, at 10 µs a call.
        many = (
            len(self._members) > 1
            and self._compiler.graphs > 1
            and self._compiler.graphs >= _torch.dynamo.recompile_limit()
        )
        return phases * (len(self._members) if many else 1)

    def _call_under(self, stance: str, member: Target, args: Any, kwargs: Any) -> Any:
        """A call of a shape that was not seen before, which is not to compile."""
        try:
            # A target inside this one would else meet the stance too, and take it for its own first call.
            with self._isolation.uncompiled(), torch.compiler.set_stance(stance):  # type: ignore[arg-type]
                return self._compiled_beyond_limit(member.module, *args, **kwargs)
        except RuntimeError as error:
            if stance not in str(error):
                raise
        target, phase = self.owner[:2]
        message = (
            f"target {target!r} was called in the {phase} phase with inputs of the shapes {shapes((args, kwargs))}, "
            "for which it is not compiled, and new_shapes='raise'; give 'recompile' or 'eager' to admit them"
        )
        raise CompileError(message)

    def _compile(self) -> None:
        name = re.sub(r"\W", "_", f"{self.owner.target}_{self.owner.phase}")
        compiled = _torch.dynamo.compile_function(
            _torch.dynamo.function_with_own_cache(_calling(self._members[0].function), name),
            self._compiler.compile,
            fullgraph=self._config.fullgraph,
            dynamic=self._config.dynamic,
        )
        if self._guards_hooks:
            compiled = _torch.dynamo.with_dynamo_settings(compiled, skip_nnmodule_hook_guards=lambda _: False)
        as_chosen = self.owner.phase == "train" and _torch.distributed.ddp_treatment_is_chosen()
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
        """Compile anew where the first hooks were registered: by torch's default a compiled module never learns.

        Guards on hooks would see it too, at a sixth more for each call's guards; so they are paid for only by a
        module that has hooks, whose removal they notice.
        """
        self._hooks_seen = _torch.dynamo.hooks_registered()
        if not self._guards_hooks and any(member.has_hooks for member in self._members):
            self._guards_hooks = True
            self._compile()

    def _remember(self, member: Target, before_compile: list[Snapshot]) -> None:
        """Dynamo begins to trace: if it fails after a graph break, the effects of the code before it are undone."""
        if not before_compile:
            before_compile.append(Snapshot(member.module))
            self._while_tracing.enter_context(_torch.dynamo.without_weak_references())
            self._while_tracing.enter_context(_torch.dynamo.without_odd_gradients())

    def _without_compiler(self, member: Target, failure: BaseException, args: Any, kwargs: Any) -> Any:
        """The call done eagerly, after the compiler gave up on it."""
        # Where the error is the user's own, the eager call raises it as it is, with its own traceback.
        result = member.eager(*args, **kwargs)
        if self._fallback.settings.on_error == "raise":
            target, phase = self.owner[:2]
            message = f"compiling target {target!r} for the {phase} phase failed: {describe(failure)}"
            raise CompileError(message) from failure
        self._uncompilable.add(signature(args, kwargs))
        self._fallback.report(failure)
        return result


class Isolation:
    """Lets all regions of a switch run eagerly.

    Attributes:
        eager: Whether they do so now.
    """

    def __init__(self) -> None:
        self.eager = False

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """A context in which all regions run eagerly."""
        before, self.eager = self.eager, True
        try:
            yield
        finally:
            self.eager = before


def _calling(function: Callable[..., Any]) -> Any:
    # A function of this file: Dynamo compiles nothing where it is handed torch's own _call_impl (traps: torch
    # 2.11 and 2.13 skip frames of torch.nn). The module is an argument, so that its weights are inputs of the graph,
    # which then serves every module of the same structure.
    def region(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return region
