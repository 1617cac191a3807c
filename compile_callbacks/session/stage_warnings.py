"""`SessionWarnings`: warns about settings without effect, uncompiled targets, recompile limits and slow steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.compiled_target import CompiledTarget
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.events import EVENT_KINDS, CompileEvent, CompileKey, EventKind
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.profiling.recorder import CompileRecorder
from compile_callbacks.session.phase_run import PhaseRun
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED

MAX_UNWARNED_RATIO = 0.95
"""The speedup above which slower steps are not worth a warning."""

LEAST_SHARE = 0.2
"""The share of a target's weights that its graphs must use. With a smaller share, most of it may run eagerly."""

_CAUSES: tuple[EventKind, ...] = ("cudagraph_skip", "fallback", "eager_call", "recompile", "graph_break")
_NAME_OTHERS = (
    "Name the modules or methods that the steps call in targets=[...]. A call inside a function that you compiled with "
    "torch.compile belongs to the graph of that function"
)


class SessionWarnings:
    """Issues each warning of a session once for each target and phase. `Session` decides when to check."""

    def __init__(
        self,
        warn: WarnOnce,
        switch: PhaseSwitch,
        recorder: CompileRecorder,
        phases: Mapping[Phase, PhaseRun],
        *,
        finds_targets: bool = False,
    ) -> None:
        self._warn = warn
        self._switch = switch
        self._recorder = recorder
        self._phases = phases
        self._finds_targets = finds_targets
        self._without_effect: dict[Phase, list[tuple[EventKind, str, str]]] = {}  # the warning, and the event's reason

    def check_settings(
        self, phase: Phase, config: InductorConfig | None, *, sharded: bool, device: torch.device, warns: bool
    ) -> None:
        """Find settings that have no effect on this module and this device. One rank ``warns`` for all."""
        without_effect = self._without_effect[phase] = []
        if config is None:
            return
        mode = f"{self._recorder.mode_arguments[phase]}={config.describe()!r}"
        if phase == "infer" and config.freezes and sharded:
            message = f"{mode} asks for freezing, which has no effect: {WEIGHTS_ARE_SHARDED}"
            without_effect.append(("freezing", message, message))
        if config.uses_cudagraphs and device.type != "cuda":
            message = (
                f"{mode} asks for CUDA graphs, and the module is not on a GPU: they have no effect. The steps run "
                "compiled without them"
            )
            reason = f"{config.describe()!r} asks for CUDA graphs, which have no effect on a {device.type.upper()}"
            without_effect.append(("cudagraph_skip", message, reason))
        for kind, message, _ in without_effect if warns else ():
            self._warn.warn("CC204", message, about=(phase, kind))

    def check_disabled(self) -> None:
        """Warn that torch compiles nothing, before the steps of the baseline."""
        if _torch.dynamo.is_disabled():
            message = "TORCH_COMPILE_DISABLE is set, so torch compiles nothing, and all steps run eagerly"
            self._warn.warn("CC101", message, about="disabled")

    def check_repeatable(self) -> None:
        """Warn that a run in the background is not repeatable, if the user asked for repeatable results."""
        if torch.are_deterministic_algorithms_enabled():
            message = (
                "background=True: the clock decides which step first runs compiled code, so two runs differ by "
                "rounding errors, although deterministic algorithms are enabled"
            )
            self._warn.warn("CC204", message, about="background")

    def helper_failed(self, problem: str, keys: Collection[CompileKey]) -> None:
        """Record and warn that the helper process compiles nothing more."""
        reason = f"the helper process that compiles in the background failed: {problem}"
        for key in keys:
            self._recorder.record("fallback", key, reason=reason, code="CC308")
        message = (
            f"{reason}. The steps whose code is not loaded yet run eagerly; background=False compiles in this process"
        )
        self._warn.warn("CC308", message)

    def check_stage(self, run: PhaseRun) -> None:
        """Warn about targets that ran uncompiled in a stage, and about slow steps.

        Before a `Tune` has chosen a candidate, the variant is eager, so there is nothing to warn about.
        """
        phase, variant = run.phase, run.chosen
        self._recorder.collect()
        for event in self._recorder.events_of(phase, "fallback"):
            if event.code == "CC103" and event.candidate == variant.name:
                self._warn_of_limit(event)
        # Without a target that torch can compile, each named target gets its own warning.
        called = self._switch.called_targets(phase) or not (self._switch.targets or self._finds_targets)
        if variant.config is not None and not called and run.times.steps(variant.name):
            names = ", ".join(repr(target.name) for target in self._switch.targets) or "none was found"
            message = (
                f"nothing is compiled in the {phase} phase, because its steps call none of the targets ({names}). "
                f"{_NAME_OTHERS}"
            )
            self._warn.warn("CC102", message, about=phase)
        for compiled_target in self._switch.compiled_targets(phase):
            on_trial = compiled_target.fallback.settings.on_trial
            if compiled_target.called and not (on_trial or compiled_target.backend.waits):
                key = compiled_target.key
                for kind, _, reason in self._without_effect[phase]:
                    self._record_once(kind, key, reason)
                self._check_graphs(compiled_target)
                self._check_share(compiled_target)
                freezes = variant.name is None and variant.config is not None and variant.config.freezes
                if freezes and not key.frozen:  # no warning, because `validate` may freeze it later
                    self._record_once("freezing", key, "freezing has no effect while weights may change, as during fit")
        self.check_step_times(run)

    def check_targets(self) -> None:
        """Warn about each named target that no phase called. `Session` calls this method after a fit."""
        if self._finds_targets:
            return
        called = self._switch.called_targets("train") | self._switch.called_targets("infer")
        for target in self._switch.targets if called else ():
            if target.name not in called:
                message = f"target {target.name!r} was never called, so it is not compiled. {_NAME_OTHERS}"
                self._warn.warn("CC102", message, about=target.name)

    def check_step_times(self, run: PhaseRun) -> None:
        """Warn if the compiled steps are slower than eager steps, by the rule of the report's verdict and by 5%."""
        phase, variant = run.phase, run.chosen
        times = run.times.times(variant.name)
        comparison = times.comparison
        if comparison is None or comparison.outcome != "slower" or comparison.ratio > MAX_UNWARNED_RATIO:
            return
        figures = f"{median_ms(times.compiled_ms):.2f} ms, eager {median_ms(times.eager_ms):.2f} ms"
        events = [e for e in reversed(self._recorder.events) if e.phase == phase and e.candidate == variant.name]
        of_kind = ([event for event in events if event.kind == kind] for kind in _CAUSES)
        cause = next((found[-1 if found[0].kind == "graph_break" else 0] for found in of_kind if found), None)
        message = (
            f"compiled {phase} steps are slower than eager steps ({figures}). {_describe(cause)}. "
            f"{phase}_mode='eager' leaves the phase eager"
        )
        self._warn.warn("CC501", message, about=(phase, cause and (cause.kind, cause.reason)))

    def check_cache_dir(self) -> None:
        """Warn if torch cached no compiled graph."""
        events = self._recorder.events
        cached = any(event.cache_hits or event.cache_misses for event in events)
        if not cached and any(event.graphs for event in events):
            message = "cache_dir has no effect: torch did not use its cache, which is disabled or bypassed"
            self._warn.warn("CC204", message, about="cache_dir")

    # ------------------------------------------------------------------------------------------ one subject each

    def _record_once(self, kind: EventKind, key: CompileKey, reason: str) -> None:
        if not any(e.target == key.target and e.reason for e in self._recorder.events_of(key.phase, kind)):
            self._recorder.record(kind, key, reason=reason, show=False)

    def _warn_of_limit(self, event: CompileEvent) -> None:
        fix = event.fix or "keep this value constant, or name parts of the target that do not read it in targets=[...]"
        last = (event.reason or "").partition(": ")[2]
        message = (
            f"target {event.target!r} reached torch's recompile limit in the {event.phase} phase. Inputs that none of "
            f"its graphs accepts run eagerly. The reason of the last recompile: {last} (all reasons: "
            f"report.{event.phase}.diagnostics.events); {fix}"
        )
        self._warn.warn("CC103", message, about=(event.target, event.phase, event.candidate))

    def _check_graphs(self, compiled_target: CompiledTarget) -> None:
        """Warn if a target that was called has no compiled graph, unless a fallback was reported."""
        key = compiled_target.key
        for event in self._recorder.events:
            same = (event.target, event.phase, event.candidate) == (key.target, key.phase, key.candidate)
            if same and (event.kind in ("fallback", "eager_call") or event.graphs):
                return
        reason = compiled_target.why_no_graph
        self._recorder.record("eager_call", key, reason=reason, code="CC101")
        if _torch.dynamo.is_disabled():
            return
        message = f"target {key.target!r} ran in the {key.phase} phase without a compiled graph: {reason}"
        self._warn.warn("CC101", message, about=key[:2])

    def _check_share(self, compiled_target: CompiledTarget) -> None:
        """Warn if graph breaks may leave most of a target eager, unless a fallback was reported."""
        key, counts = compiled_target.key, compiled_target.backend.weights_in_graphs
        if counts is None or not compiled_target.backend.graphs or counts[0] >= LEAST_SHARE * counts[1]:
            return
        kinds: tuple[EventKind, ...] = ("graph_break", "fallback")
        events = [e for kind in kinds for e in self._recorder.events_of(key.phase, kind) if e.target == key.target]
        if not events or any(event.kind != "graph_break" for event in events):
            return
        first = events[0]
        where = f" ({first.file}:{first.line})" if first.file else ""
        message = (
            f"the compiled graphs of target {key.target!r} use {counts[0]} of its {counts[1]} weights "
            f"({counts[0] / counts[1]:.0%}) in the {key.phase} phase, so its other layers run eagerly or are not used. "
            f"The first graph break: {short_reason(first.reason or '')}{where}. If the other layers run, compile "
            "only the parts that torch can trace, or leave the phase eager"
        )
        self._warn.warn("CC131", message, about=key[:2])


def _describe(cause: CompileEvent | None) -> str:
    if cause is None:
        return "torch reports no cause. Other programs that use the machine are a possible cause"
    reason = short_reason(cause.reason or "torch gives no reason")
    which = "first" if cause.kind == "graph_break" else "last"
    event = f"the {which} {EVENT_KINDS[cause.kind].name} of target {cause.target!r} ({reason})"
    return f"Possible causes are {event}, and other programs that use the machine"
