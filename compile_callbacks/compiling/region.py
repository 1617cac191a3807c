"""One target compiled with one phase's settings, and what happens where the compiler fails."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.compiling.cudagraphs import with_lasting_outputs
from compile_callbacks.compiling.shapes import NewShapes, ShapePolicy, shapes, signature
from compile_callbacks.compiling.sharding import MOVING_WEIGHTS
from compile_callbacks.compiling.snapshot import Snapshot
from compile_callbacks.compiling.targets import Compiled, Target
from compile_callbacks.compiling.verify import Comparison, Verify, call_and_compare, compare_with_eager
from compile_callbacks.compiling.weights import WeightWatch
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.folding.settings import FoldSettings
from compile_callbacks.links import Entry, see
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.passes import GraphPassError, PassRun, pass_hook, pass_name, pass_options
from compile_callbacks.phases import Phase
from compile_callbacks.processes.meetings import Meetings
from compile_callbacks.settings.config import InductorConfig

if TYPE_CHECKING:
    from compile_callbacks.folding.folded import FoldedGraph

OnError = Literal["eager", "raise"]
"""What a failure of the compiler does: cost speed, or end the run."""

ON_ERROR: tuple[OnError, ...] = get_args(OnError)


class CompileError(RuntimeError):
    """The compiler failed on a target, and ``on_error="raise"`` was asked for."""


class CompileWarning(UserWarning):
    """Something was not compiled as asked."""


class Isolation:
    """Shared by the regions of one switch.

    Attributes:
        eager: While it holds, all of them run uncompiled.
    """

    def __init__(self) -> None:
        self.eager = False

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Nothing within runs compiled, targets inside a target neither."""
        before, self.eager = self.eager, True
        try:
            yield
        finally:
            self.eager = before


@dataclass(frozen=True, kw_only=True)
class RegionSettings:
    """What a region does beside compiling.

    Attributes:
        on_error: What a failure of the compiler does.
        verify: What a difference from eager on the first call does.
        new_shapes: What an unseen input shape does.
        on_trial: Whether the settings are candidates of a `Tune`: what fails or differs runs eagerly, whatever else is
            asked for, and is left to the `Tune`; what there is to say is said when they are chosen.
    """

    on_error: OnError = "eager"
    verify: Verify = "off"
    new_shapes: NewShapes = "recompile"
    on_trial: bool = False

    def for_trial(self) -> RegionSettings:
        """These settings while candidates are tried."""
        return replace(self, on_error="eager", verify="off" if self.verify == "off" else "eager", on_trial=True)


@dataclass(frozen=True)
class _Attempt:
    """Compiling one graph: what its passes did, and those of them that failed and are left out."""

    runs: list[PassRun] = field(default_factory=list)
    skipped: list[Any] = field(default_factory=list)


class CompiledRegion:
    """A target compiled for a phase; called in place of the target.

    Each graph is handed to Inductor by a backend of its own, so that every compile is known by target and
    phase, and so that a graph that Inductor fails on runs eagerly, forward and backward, where it stands.

    Blocks that are repeated share a region: one function, which is given the block, is compiled for all of them, and
    torch's guards tell where a block needs a graph of its own.

    Args:
        target: What is compiled.
        phase: The phase it is compiled for.
        config: The settings.
        passes: Graph passes to run before those of ``config``.
        recorder: Told of everything that happens.
        isolation: Shared with the regions of the same switch.
        meetings: Where several processes wait for each other's compiles.
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
        meetings: Meetings | None = None,
        settings: RegionSettings | None = None,
        frozen: bool = False,
        name: str | None = None,
    ) -> None:
        self.target = target
        self.owner = Owner(target.name, phase, frozen, name)
        self.ran = False
        self._settings = settings or RegionSettings()
        self._config = config
        self._members = target.members
        self._one_limit = len(self._members) == 1 and not _torch.SHARES_RECOMPILE_LIMIT
        self._recorder = recorder
        self._isolation = isolation or Isolation()
        self._meetings = meetings or Meetings()
        # Of each block: what calls the first of them differs from what calls the others (a gradient to pass on).
        self._shapes = {member: ShapePolicy(self._settings.new_shapes) for member in self._members}
        self._unverified = set(self._members) if self._settings.verify != "off" else set()
        self._gave_up = False
        self._failed_here = False
        self._fell_back = False
        self._warned = False
        self._unsaid: list[tuple[str, Entry]] = []
        self._passes_said: list[Any] = []
        self._uncompilable: set[Any] = set()
        self._passes = (*passes, *config.passes)
        self._template_said = False
        self._device = torch.device("cpu")
        self._guards_hooks = False
        self._hooks_seen = -1
        self._weights = WeightWatch(self._members[0].module)  # baked in where there is one member alone
        self._suspects_weights = True
        self._baked_in = False
        self._before_compile: Snapshot | None = None
        self._folded: list[weakref.ref[FoldedGraph]] = []
        self._generated: list[ModuleType] = []
        self._graphs = 0
        self._compiled_of: dict[Any, set[Target]] = {}
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target, compiled for the phase; of repeated blocks the first."""
        return self._call(self._members[0], *args, **kwargs)

    def on(self, member: Target) -> Callable[..., Any]:
        """What calls one of the target's members, compiled for the phase."""
        return functools.partial(self._call, member)

    def _call(self, member: Target, /, *args: Any, **kwargs: Any) -> Any:
        if self._isolation.eager:
            return member.eager(*args, **kwargs)
        self.ran = True
        try:
            if self._meetings.in_step and self._meetings.is_first(self.owner, member.name):
                call = functools.partial(self._run, member, *args, **kwargs)
                return self._meetings.first_call(self.owner, member.name, call, cached=self._is_cached())
            return self._run(member, *args, **kwargs)
        except CompileError as error:
            self._meetings.end_run(str(error))
            raise

    def give_up(self, reason: str) -> None:
        """Run eagerly from here on, because the compiler failed on the target in this process or in another.

        Args:
            reason: Which process it was, and why it failed.
        """
        if self._gave_up:
            return
        self._gave_up = True
        if self._failed_here:
            return  # known
        self._recorder.add("fallback", self.owner, reason=reason)
        if self._meetings.speaks and not self._settings.on_trial:
            target, phase = self.owner[:2]
            message = f"target {target!r} runs eagerly in the {phase} phase, in every process: {in_one_line(reason)}"
            message += f" (the whole of it: callback.report.{phase}.events)"
            warnings.warn(see(message, "the-compiler-failed"), CompileWarning, stacklevel=2)

    def _run(self, member: Target, /, *args: Any, **kwargs: Any) -> Any:
        if self._gave_up:
            return member.eager(*args, **kwargs)
        if self.owner.frozen:
            self._refreeze_if_weights_changed()
        if self._hooks_seen != _torch.hooks_registered():
            self._look_for_hooks()
        if self._uncompilable and signature(args, kwargs) in self._uncompilable:
            return member.eager(*args, **kwargs)
        recorder, outer, outer_on_trace = self._recorder, self._recorder.owner, self._recorder.on_trace
        recorder.owner, recorder.on_trace = self.owner, functools.partial(self._remember, member)
        self._before_compile, graphs_before, failure = None, self._graphs, None
        try:
            result = self._compiled_call(member, args, kwargs)
        except Exception as error:
            if not _torch.raised_while_compiling(error):
                raise
            failure = error
        finally:
            recorder.owner, recorder.on_trace = outer, outer_on_trace
        if failure is not None:
            result = self._without_compiler(member, failure, args, kwargs)
        if self._graphs > graphs_before and len(self._members) > 1:
            looks = signature(args, kwargs), torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            self._compiled_of.setdefault(looks, set()).add(member)
        while (
            self._unsaid and not self._settings.on_trial
        ):  # after the call: within the backend, a warning that is made an error would end in Dynamo
            self._warn(*self._unsaid.pop(0))
        return result

    @property
    def blocks_differ(self) -> bool:
        """Whether each of several repeated blocks had to be compiled by itself, when all were called alike."""
        return any(len(found) == len(self._members) for found in self._compiled_of.values())

    def _compiled_call(self, member: Target, args: Any, kwargs: Any) -> Any:
        policy = self._shapes[member]
        if self._settings.on_trial:
            # The first call of a candidate may be the odd one of a run, the last batch of an epoch for example.
            policy.admit(args, kwargs)
        stance = policy.stance(args, kwargs)
        if member in self._unverified:  # its first call, whose shapes are known from here on
            return self._verified_call(member, args, kwargs)
        if stance is not None:
            return self._call_under(stance, member, args, kwargs)
        return self._call_compiled(member, *args, **kwargs)

    def suspect_weights(self) -> None:
        """Believe no weight before the next call to be what it was: a stage begins, and may have swapped them."""
        self._suspects_weights = True
        for graph in self._folded_graphs():
            graph.suspect_weights()

    def free_folded_weights(self) -> None:
        """Give back the memory that folded weights take, until the next call."""
        for graph in self._folded_graphs():
            graph.free()

    def free_compiled(self) -> None:
        """Give back what compiled code takes, weights that are folded or baked in among it; the next call compiles."""
        self.free_folded_weights()
        self._folded.clear()
        self._compiled = self._compiled_beyond_limit = self._compile_and_call
        self._baked_in = False
        _torch.forget_compiled(self._backend)
        _torch.forget_generated(self._generated)
        self._generated.clear()

    def admit_shapes(self, args: Any, kwargs: Any) -> None:
        """Have calls with inputs of these shapes compile, whatever new shapes do."""
        for policy in self._shapes.values():
            policy.admit(args, kwargs)

    @property
    def on_trial(self) -> bool:
        """Whether the settings are candidates of a `Tune`."""
        return self._settings.on_trial

    def choose(self, settings: RegionSettings) -> None:
        """The settings are on trial no more; what there was to say meanwhile is said at the next call."""
        self._settings = settings

    def _folded_graphs(self) -> list[FoldedGraph]:
        """The folded graphs that are still in use."""
        return [graph for reference in self._folded if (graph := reference()) is not None]

    def _refreeze_if_weights_changed(self) -> None:
        if self._weights.changed(thorough=self._suspects_weights) and self._baked_in:
            self.free_compiled()  # else every set of weights that was ever baked in would stay
        self._suspects_weights, self._baked_in = False, True

    def _call_compiled(self, member: Target, /, *args: Any, **kwargs: Any) -> Any:
        if self._one_limit or self._limit_factor == 1:
            return self._compiled(member.module, *args, **kwargs)
        return self._compiled_beyond_limit(member.module, *args, **kwargs)

    @property
    def _limit_factor(self) -> int:
        """How many times as many graphs as torch's recompile limit allows for the code of one target."""
        # Behind a break, both phases' graphs are on the user's code.
        phases = 2 if _torch.SHARES_RECOMPILE_LIMIT and self.owner in self._recorder.broken else 1
        # Blocks that differ are compiled each; below torch's limit there is nothing to lift, at 10 µs a call.
        many = len(self._members) > 1 and self._graphs > 1 and self._graphs >= _torch.recompile_limit()
        return phases * (len(self._members) if many else 1)

    def _call_under(self, stance: str, member: Target, args: Any, kwargs: Any) -> Any:
        """A call of a shape that was not seen before, which is not to compile."""
        try:
            # A target inside this one would else meet the stance too, and take it for its own first call.
            with self._isolation.uncompiled(), torch.compiler.set_stance(stance):  # type: ignore[arg-type]
                return self._call_compiled(member, *args, **kwargs)
        except RuntimeError as error:
            if stance not in str(error):
                raise
        target, phase = self.owner[:2]
        message = (
            f"target {target!r} was called in the {phase} phase with inputs of the shapes {shapes((args, kwargs))}, "
            "for which it is not compiled, and new_shapes='raise'; give 'recompile' or 'eager' to admit them"
        )
        raise CompileError(see(message, "a-new-shape"))

    def _verified_call(self, member: Target, args: Any, kwargs: Any) -> Any:
        """A first call: compared with eager, and followed by what the user asked for."""
        self._unverified.remove(member)
        compiled = functools.partial(self._call_compiled, member)
        if left_out := member.why_not_twice():
            self._note_comparison(left_out)
            return compiled(*args, **kwargs)

        def eager(*args: Any, **kwargs: Any) -> Any:
            with self._isolation.uncompiled():
                return member.eager(*args, **kwargs)

        call = member.module, eager, compiled, args, kwargs
        if not self._config.uses_cudagraphs:
            self._judge(compare_with_eager(*call))
            return (member.eager if self._gave_up else compiled)(*args, **kwargs)
        compared, result = call_and_compare(*call)
        self._judge(compared)
        if torch.is_grad_enabled():
            self._note_comparison("gradients: CUDA graphs take no backward beside the step's")
        if compared.problem is None:
            return result
        return (member.eager if self._gave_up else compiled)(*args, **kwargs)

    def _note_comparison(self, reason: str | None, max_abs_error: float | None = None) -> None:
        """Report what came of a comparison; of repeated blocks once why they were not compared."""
        said = (event for event in self._recorder.of(self.owner.phase, "verify") if event.target == self.owner.target)
        if max_abs_error is None and any(event.reason == reason for event in said):
            return
        self._recorder.add("verify", self.owner, reason=reason, max_abs_error=max_abs_error)

    def _judge(self, compared: Comparison) -> None:
        """Report a comparison, and do what the user asked for where it found a difference."""
        target, phase = self.owner[:2]
        self._note_comparison(compared.problem or compared.left_out, compared.max_abs_error)
        if compared.problem is None:
            return
        self._unverified.clear()  # one difference is told of, and what follows from it holds for all
        if self._settings.on_trial:
            self._gave_up = True
            self._fails(compared.problem)
            return
        message = f"target {target!r} does not compute in the {phase} phase what it does eagerly: {compared.problem}"
        if self._settings.verify == "raise":
            raise CompileError(see(f"{message} (verify='raise')", "differs-from-eager"))
        if self._settings.verify == "eager":
            self._gave_up = True
            self._recorder.add("fallback", self.owner, reason=compared.problem)
            self._fails(compared.problem)
            message += "; it runs eagerly from here on (verify='eager')"
            if not self._meetings.speaks:
                return  # the first process says so when it hears of it
        self._warn(message, "differs-from-eager")

    def _warn(self, message: str, entry: Entry) -> None:
        if not self._meetings.warn_elsewhere((self.owner, message), see(message, entry)):
            warnings.warn(see(message, entry), CompileWarning, stacklevel=3)

    def _fails(self, reason: str) -> None:
        """The other processes are to run the target eagerly, too."""
        self._failed_here = True
        self._meetings.failed(self.owner, reason)

    def _is_cached(self) -> bool:
        """Whether torch keeps what is compiled in its cache on disk, where other processes find it."""
        return not self.owner.frozen and _torch.caches_graphs() and all(p.uuid() is not None for p in self._passes)

    def _compile(self) -> None:
        name = re.sub(r"\W", "_", f"{self.owner.target}_{self.owner.phase}")
        compiled = _torch.compile_function(
            _torch.function_with_own_cache(_calling(self._members[0].function), name),
            self._backend,
            fullgraph=self._config.fullgraph,
            dynamic=self._config.dynamic,
        )
        if self._guards_hooks:
            compiled = _torch.with_dynamo_settings(compiled, skip_nnmodule_hook_guards=lambda _: False)
        if self.owner.phase == "infer" and torch.distributed.is_available():
            compiled = _torch.outside_ddp(compiled)
        self._compiled = compiled
        self._compiled_beyond_limit = _torch.with_dynamo_settings(
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
        self._hooks_seen = _torch.hooks_registered()
        if not self._guards_hooks and any(member.has_hooks for member in self._members):
            self._guards_hooks = True
            self._compile()

    def _backend(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._device = _device_of(example_inputs)
        self._note_template()
        attempt = _Attempt()
        with self._folding() as inner_compile, _torch.generated_with_constants() as generated:
            compiled = _torch.compile_graph(
                graph_module,
                example_inputs,
                patches=self._patches(attempt),
                other_patches=functools.partial(self._without_failed_pass, attempt),
                fallback=self._may_fall_back,
                on_lowered=lambda seconds, backward: self._recorder.graph_lowered(seconds, is_backward=backward),
                inner_compile=inner_compile,
            )
        self._generated += generated
        if self._fell_back:
            self._fell_back = False
            return compiled
        self._note_passes(attempt)
        self._graphs += 1
        self._recorder.graph_compiled()  # here: Dynamo may restart its analysis from within, and come again
        return with_lasting_outputs(compiled) if self._config.uses_cudagraphs else compiled

    def _patches(self, attempt: _Attempt) -> dict[str, Any]:
        options = {**self._config.resolved_options(self._device), "freezing": self.owner.frozen}
        passes = pass_options(self._passes, self.owner.phase, attempt.runs.append, skipped=attempt.skipped)
        return {**options, **passes}

    def _note_template(self) -> None:
        """Say once what the template lacks on this device, which is known no earlier than here."""
        if self._template_said or (falls_back := self._config.template_falls_back(self._device)) is None:
            return
        self._template_said = True
        self._recorder.add("template", self.owner, reason=falls_back)
        self._unsaid.append((f"{self.owner.phase}_mode: {falls_back}", "a-template-falls-back"))

    def _note_passes(self, attempt: _Attempt) -> None:
        """Report what passes did, and tell a graph that torch's cache gave back from one without a match."""
        for run in attempt.runs:
            self._recorder.pass_ran(self.owner, run.to_dict())
        ran = {(run.name, run.hook) for run in attempt.runs}
        for graph_pass in self._passes:
            name, hook = pass_name(graph_pass), pass_hook(graph_pass)
            if (name, hook) not in ran and not any(graph_pass is other for other in attempt.skipped):
                self._recorder.pass_ran(self.owner, {"name": name, "hook": hook, "from_cache": True})

    def _without_failed_pass(self, attempt: _Attempt, error: Exception) -> dict[str, Any] | None:
        """How to compile a graph once more where a custom pass failed on it: without that pass."""
        failure = _failed_pass(error)
        if failure is None or self._settings.on_error == "raise":
            return None
        if self._settings.on_trial and any(failure.failed is own for own in self._config.passes):
            return None  # without the pass it would be other settings that are tried
        attempt.runs.clear()
        attempt.skipped.append(failure.failed)
        self._recorder.add("pass_skipped", self.owner, reason=str(failure))
        if not any(failure.failed is other for other in self._passes_said):
            self._passes_said.append(failure.failed)
            target, phase = self.owner[:2]
            message = (
                f"{in_one_line(str(failure))} (target {target!r}); the graph is compiled without it (each time: "
                f"callback.report.{phase}.events; on_error='raise' ends the run)"
            )
            self._unsaid.append((message, "a-graph-pass-failed"))
        return self._patches(attempt)

    @contextlib.contextmanager
    def _folding(self) -> Iterator[Callable[..., Any]]:
        """How to compile a graph of AOTAutograd's: with its weight arithmetic folded, where that is asked for."""
        if self.owner.frozen or not self._config.folds_weights(self.owner.phase):
            yield _torch.compile_inner
        elif self._config.resolved_options(self._device).get("cpp_wrapper"):
            self._not_folded("cpp_wrapper: Inductor tunes its kernels with the inputs of the graph as a whole")
            yield _torch.compile_inner
        elif self._members[0].sharded:
            self._not_folded(MOVING_WEIGHTS)
            yield _torch.compile_inner
        elif len(self._members) > 1:
            self._not_folded("repeated blocks share a graph, and each has weights of its own")
            yield _torch.compile_inner
        elif _torch.has_tensor_subclasses(self._members[0].module):
            self._not_folded("its weights are tensor subclasses, as shards are: what holds their memory may change")
            yield _torch.compile_inner
        else:
            # Imported here: it takes Inductor's code generator with it, which takes seconds.
            from compile_callbacks.folding.folded import compile_inner, folding

            with folding(self._fold_settings()):
                yield compile_inner

    def _fold_settings(self) -> FoldSettings:
        return FoldSettings(
            limit_mb=self._config.fold_limit_mb,
            on_folded=self._remember_folded,
            on_left_out=self._not_folded,
            on_refresh=lambda: self._recorder.weights_refreshed(self.owner),
        )

    def _remember_folded(self, graph: FoldedGraph) -> None:
        self._folded.append(weakref.ref(graph))
        self._recorder.add("fold", self.owner, folded_mb=graph.folded_bytes / 2**20)

    def _not_folded(self, reason: str) -> None:
        self._recorder.add("fold", self.owner, reason=reason)

    def _may_fall_back(self, error: Exception) -> bool:
        """Whether a graph on which Inductor failed is to run eagerly."""
        if self._settings.on_error == "raise":
            return False
        self._report(error)
        self._fell_back = True
        return True

    def _remember(self, member: Target) -> None:
        """Dynamo begins to trace: if it fails behind a graph break, what ran before the break is to be undone."""
        if self._before_compile is None:
            self._before_compile = Snapshot(member.module)

    def _without_compiler(self, member: Target, failure: Exception, args: Any, kwargs: Any) -> Any:
        """The call done eagerly, after the compiler gave up on it."""
        if self._before_compile is not None:
            self._before_compile.restore()
            self._before_compile = None
        # Where the error is the user's own, the eager call raises it as it is, with its own traceback.
        result = member.eager(*args, **kwargs)
        if self._settings.on_error == "raise":
            target, phase = self.owner[:2]
            message = f"compiling target {target!r} for the {phase} phase failed: {_describe(failure)}"
            raise CompileError(see(message, _entry(failure))) from failure
        self._uncompilable.add(signature(args, kwargs))
        self._report(failure)
        return result

    def _report(self, error: Exception) -> None:
        reason = _describe(error)
        self._recorder.add("fallback", self.owner, reason=reason)
        self._fails(reason)
        if self._meetings.speaks and not self._warned:  # for another process, the first one says so when it hears of it
            self._warned = True
            target, phase = self.owner[:2]
            message = (
                f"target {target!r} runs eagerly in the {phase} phase, because the compiler failed: "
                f"{in_one_line(reason)} (the whole of it: callback.report.{phase}.events; more: "
                "TORCH_LOGS='+dynamo,+inductor', or on_error='raise')"
            )
            self._unsaid.append((message, _entry(error)))


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Where a graph computes: on the GPU, where any of its inputs or weights is there."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _failed_pass(error: BaseException) -> GraphPassError | None:
    return next((cause for cause in _torch.causes(error) if isinstance(cause, GraphPassError)), None)


def _describe(error: BaseException) -> str:
    failed_pass = _failed_pass(error)
    return describe_failure(error) if failed_pass is None else str(failed_pass)


def _entry(error: BaseException) -> Entry:
    return "the-compiler-failed" if _failed_pass(error) is None else "a-graph-pass-failed"


def _calling(function: Callable[..., Any]) -> Any:
    # A function of this file: Dynamo compiles nothing where it is handed torch's own _call_impl (traps: torch
    # 2.11 and 2.13 skip frames of torch.nn). The module is an argument, so that its weights are inputs of the graph,
    # which then serves every module of the same structure.
    def region(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return function(module, *args, **kwargs)

    return region
