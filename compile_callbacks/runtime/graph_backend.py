"""Torch's backend for the graphs of one target: Inductor, with the phase's settings, graph passes and folding."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.folding.fold_settings import FoldSettings
from compile_callbacks.passes.base import pass_hook, pass_name
from compile_callbacks.passes.manager import PassRun, pass_options
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.runtime.cudagraphs import with_cloned_outputs, with_warmup_repair
from compile_callbacks.runtime.double_backward import with_repeated_backward
from compile_callbacks.runtime.fallback import EagerFallback, find_pass_error
from compile_callbacks.runtime.fsdp import WEIGHTS_ARE_SHARDED
from compile_callbacks.runtime.repeated import Compiled
from compile_callbacks.runtime.target import Target
from compile_callbacks.runtime.verification import Verification

if TYPE_CHECKING:
    from compile_callbacks.folding.folded import FoldedGraph


@dataclass(frozen=True)
class _Attempt:
    """Compiling one graph: what its passes did, and those of them that failed and are left out."""

    runs: list[PassRun] = field(default_factory=list)
    skipped: list[Any] = field(default_factory=list)


class GraphBackend:
    """Compiles each graph that Dynamo captures of a target.

    A graph that Inductor fails on runs eagerly, forward and backward, where it stands; one on which a graph pass fails
    is compiled without that pass.

    Args:
        target: What the graphs are of.
        key: The target and the phase it is compiled for.
        config: The settings.
        passes: Graph passes to run before those of ``config``.
        recorder: Told of everything that happens.
        fallback: Where failures lead; its settings tell what they do.

    Attributes:
        graphs: How many were compiled.
    """

    def __init__(
        self,
        target: Compiled,
        key: CompileKey,
        config: InductorConfig,
        passes: Sequence[Any],
        *,
        recorder: CompileRecorder,
        fallback: EagerFallback,
    ) -> None:
        self.graphs = 0
        # Torch keeps every backend, which must not keep the module.
        self._first = weakref.ref(target.members[0])
        self._shared = len(target.members) > 1
        self._key = key
        self._config = config
        self._passes = (*passes, *config.passes)
        self._recorder = recorder
        self._fallback = fallback
        self._verification = Verification(key, target.members, recorder=recorder, fallback=fallback)
        self._device = torch.device("cpu")
        self._fell_back = False
        self._template_said = False
        self._folded: list[weakref.ref[FoldedGraph]] = []
        self._generated: list[ModuleType] = []

    def compile(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph: what ``torch.compile`` takes as its ``backend``."""
        self._device = _device_of(example_inputs)
        self._note_template()
        attempt = _Attempt()
        eager = _torch.graphs.eager_graph(graph_module)  # a copy, because Inductor changes the graph that it compiles
        collective = _torch.graphs.has_collective(graph_module)
        with self._folding() as inner_compile, _torch.inductor.generated_with_constants() as generated:
            compiled = _torch.inductor.compile_graph(
                graph_module,
                example_inputs,
                patches=self._patches(attempt),
                other_patches=functools.partial(self._without_failed_pass, attempt),
                fallback=self._may_fall_back,
                on_lowered=lambda seconds, backward: self._recorder.add_lowering_time(seconds, is_backward=backward),
                inner_compile=inner_compile,
            )
        self._generated += generated
        if self._fell_back:
            self._fell_back = False
            return compiled
        self._note_passes(attempt)
        self.graphs += 1
        self._recorder.count_graph()  # here: Dynamo may restart its analysis from within, and come again
        uses_cudagraphs = self._config.uses_cudagraphs and self._device.type == "cuda"
        compiled = self._verification.wrap(
            compiled,
            eager,
            collective=collective,
            uses_cudagraphs=uses_cudagraphs,
            draws_as_eager=_torch.inductor.draws_as_eager(self._config.resolved_options(self._device)),
        )
        if torch.is_grad_enabled() and not self._member.sharded:
            target = self._key.target
            compiled = with_repeated_backward(compiled, eager, target=target, on_recompute=self._say_recomputed)
        if uses_cudagraphs:
            return with_cloned_outputs(with_warmup_repair(compiled, self._device, self._say_repaired))
        return compiled

    @property
    def _member(self) -> Target:
        """The target, or the first of repeated blocks; it exists while one of them is called."""
        member = self._first()
        assert member is not None
        return member

    def folded_graphs(self) -> list[FoldedGraph]:
        """The folded graphs that are still in use."""
        return [graph for reference in self._folded if (graph := reference()) is not None]

    def free_folded(self) -> None:
        """Give back the memory that folded weights take, until the next call."""
        for graph in self.folded_graphs():
            graph.free()

    def free(self) -> None:
        """Give back what compiled code takes, weights that are folded or baked in among it."""
        self.free_folded()
        self._folded.clear()
        _torch.dynamo.forget_compiled(self.compile)
        _torch.inductor.forget_generated(self._generated)
        self._generated.clear()

    def _patches(self, attempt: _Attempt) -> dict[str, Any]:
        options = {**self._config.resolved_options(self._device), "freezing": self._key.frozen}
        passes = pass_options(self._passes, self._key.phase, attempt.runs.append, skipped=attempt.skipped)
        return {**options, **passes}

    def _may_fall_back(self, error: Exception) -> bool:
        """Whether a graph on which Inductor failed is to run eagerly."""
        if self._fallback.settings.on_error == "raise":
            return False
        self._fallback.compiler_failed(error)
        self._fell_back = True
        return True

    def _say_recomputed(self) -> None:
        """Say once that gradients are computed eagerly: it is paid for in each step that asks for it."""
        target, phase = self._key[:2]
        message = (
            f"gradients of target {target!r} are differentiated in the {phase} phase (create_graph=True), so the "
            f"target is computed a second time, eagerly; if most steps do so, {phase}_mode=None is faster"
        )
        self._fallback.warn("CC303", message)

    def _say_repaired(self) -> None:
        """Warn once that a warm-up of a CUDA graph failed, because its graph is warmed up and recorded again."""
        target, phase = self._key[:2]
        message = (
            f"target {target!r} ({phase} phase): the first run of a CUDA graph raised an exception before this call, "
            "such as OutOfMemoryError; torch warms that graph up again at its next call"
        )
        self._fallback.warn_after_call("CC305", message)

    # ------------------------------------------------------------------------------------------ templates and passes

    def _note_template(self) -> None:
        """Say once what the template lacks on this device, which is known no earlier than here."""
        if self._template_said or (falls_back := self._config.template_falls_back(self._device)) is None:
            return
        self._template_said = True
        self._recorder.record("template", self._key, reason=falls_back)
        self._fallback.warn_after_call("CC204", f"{self._key.phase}_mode: {falls_back}", about=self._key.phase)

    def _note_passes(self, attempt: _Attempt) -> None:
        """Report what passes did, and tell a graph that torch's cache gave back from one without a match."""
        for run in attempt.runs:
            self._recorder.record_pass(self._key, run.to_dict())
        ran = {(run.name, run.hook) for run in attempt.runs}
        for graph_pass in self._passes:
            name, hook = pass_name(graph_pass), pass_hook(graph_pass)
            if (name, hook) not in ran and not any(graph_pass is other for other in attempt.skipped):
                self._recorder.record_pass(self._key, {"name": name, "hook": hook, "from_cache": True})

    def _without_failed_pass(self, attempt: _Attempt, error: Exception) -> dict[str, Any] | None:
        """How to compile a graph once more where a custom pass failed on it: without that pass."""
        failure, settings = find_pass_error(error), self._fallback.settings
        if failure is None or settings.on_error == "raise":
            return None
        if settings.on_trial and any(failure.failed is own for own in self._config.passes):
            return None  # without the pass it would be other settings that are tried
        attempt.runs.clear()
        attempt.skipped.append(failure.failed)
        self._recorder.record("pass_skipped", self._key, reason=str(failure))
        target, phase = self._key[:2]
        message = (
            f"{in_one_line(str(failure))} (target {target!r}); the graph is compiled without the pass (all failures: "
            f"callback.report.{phase}.diagnostics.events; on_error='raise' raises instead)"
        )
        self._fallback.warn_after_call("CC701", message, about=(target, phase, pass_name(failure.failed)))
        return self._patches(attempt)

    # ------------------------------------------------------------------------------------------ folded weights

    @contextlib.contextmanager
    def _folding(self) -> Iterator[Callable[..., Any]]:
        """How to compile a graph of AOTAutograd's: with its weight arithmetic folded, where that is asked for."""
        if self._key.frozen or not self._config.folds_weights(self._key.phase):
            yield _torch.inductor.compile_inner
        elif reason := self._why_not_folded():
            self._not_folded(reason)
            yield _torch.inductor.compile_inner
        else:
            # Imported here: it takes Inductor's code generator with it, which takes seconds.
            from compile_callbacks.folding.folded import compile_inner, folding

            with folding(self._fold_settings()):
                yield compile_inner

    def _why_not_folded(self) -> str | None:
        if self._config.resolved_options(self._device).get("cpp_wrapper"):
            return "cpp_wrapper: Inductor tunes its kernels with the inputs of the graph as a whole"
        if self._member.sharded:
            return WEIGHTS_ARE_SHARDED
        if self._shared:
            return "repeated blocks share a graph, and each has weights of its own"
        if _torch.graphs.has_tensor_subclasses(self._member.module):
            return "its weights are tensor subclasses, as shards are: what holds their memory may change"
        return None

    def _fold_settings(self) -> FoldSettings:
        return FoldSettings(
            limit_mib=self._config.fold_limit_mib,
            on_folded=self._remember_folded,
            on_left_out=self._not_folded,
            on_refresh=lambda: self._recorder.count_weight_refresh(self._key),
        )

    def _remember_folded(self, graph: FoldedGraph) -> None:
        self._folded.append(weakref.ref(graph))
        self._recorder.record("fold", self._key, folded_mib=graph.folded_bytes / 2**20)

    def _not_folded(self, reason: str) -> None:
        self._recorder.record("fold", self._key, reason=reason)


def _device_of(example_inputs: Sequence[Any]) -> torch.device:
    """Where a graph computes: on the GPU, where any of its inputs or weights is there."""
    devices = [value.device for value in example_inputs if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
