"""Functions that find problems of a `PhaseRun`, of which a `Session` warns and which it records."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks.calls.compiled_target import CompiledTarget
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.profiling.comparison import median_ms
from compile_callbacks.profiling.events import CompileEvent, CompileKey, EventKind
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.session.phase_run import PhaseRun
from compile_callbacks.targets.fsdp import WEIGHTS_ARE_SHARDED

MAX_UNWARNED_RATIO = 0.95
"""The speedup above which slower steps are not worth a warning."""

LEAST_SHARE = 0.2
"""The share of a target's weights that its graphs must use. With a smaller share, most of it may run eagerly."""

_CAUSES: tuple[EventKind, ...] = ("cudagraph_skip", "fallback", "eager_call", "recompile", "graph_break")
NAME_OTHERS = (
    "Name the modules or methods that the steps call in targets=[...]. A call inside a function that you compiled with "
    "torch.compile belongs to the graph of that function"
)


class Finding(NamedTuple):
    """Something that the user should know.

    Attributes:
        code: The code of the warning.
        message: The message of the warning, or "" if the report alone tells it.
        about: The subject. Each warning is issued once for each subject.
        event: The event to record, if no event tells it yet.
    """

    code: str = ""
    message: str = ""
    about: Hashable = None
    event: tuple[EventKind, CompileKey, str] | None = None


def nothing_called(run: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool) -> Iterator[Finding]:
    """Find that the steps call none of the targets."""
    # Without a target that torch can compile, each named target gets its own warning.
    called = (
        switch.called_targets(run.phase) or not (switch.targets or finds_targets) or not _torch.dynamo.has_call_slot()
    )
    if run.chosen.config is not None and not called and run.times.steps(run.chosen.name):
        names = ", ".join(repr(target.name) for target in switch.targets) or "none was found"
        message = (
            f"nothing is compiled in the {run.phase} phase, because its steps call none of the targets ({names}). "
            f"{NAME_OTHERS}"
        )
        yield Finding("CC102", message, run.phase)


def recompile_limits(run: PhaseRun) -> Iterator[Finding]:
    """Find targets that reached torch's recompile limit."""
    for event in run.events("fallback", candidate=run.chosen.name):
        if event.code == "CC103":
            advice = "keep this value constant, or name parts of the target that do not read it in targets=[...]"
            last = (event.reason or "").partition(": ")[2]
            message = (
                f"target {event.target!r} reached torch's recompile limit in the {run.phase} phase. Inputs that none "
                f"of its graphs accepts run eagerly. The reason of the last recompile: {last} (all reasons: "
                f"report.{run.phase}.diagnostics.events); {event.fix or advice}"
            )
            yield Finding("CC103", message, (event.target, run.phase, event.candidate))


def settings_without_effect(run: PhaseRun, *, sharded: bool) -> Iterator[tuple[EventKind, str, str]]:
    """Find settings that have no effect on this module and this device: the kind of event, a message, and a reason."""
    if (config := run.chosen.config) is None:
        return
    mode = f"{run.mode_argument}={config.describe()!r}"
    if run.phase == "infer" and config.freezes and sharded:
        message = f"{mode} asks for freezing, which has no effect: {WEIGHTS_ARE_SHARDED}"
        yield "freezing", message, message
    if config.uses_cudagraphs and run.device.type != "cuda":
        message = (
            f"{mode} asks for CUDA graphs, and the module is not on a GPU: they have no effect. The steps run compiled "
            "without them"
        )
        reason = f"{config.describe()!r} asks for CUDA graphs, which have no effect on a {run.device.type.upper()}"
        yield "cudagraph_skip", message, reason


def unfrozen(run: PhaseRun, compiled: CompiledTarget) -> Iterator[Finding]:
    """Find that freezing has no effect on a target yet. No warning, because `validate` may freeze it later."""
    config = run.chosen.config
    if run.chosen.name is None and config is not None and config.freezes and not compiled.backend.frozen:
        reason = "freezing has no effect while weights may change, as during fit"
        yield Finding(event=("freezing", compiled.key, reason))


def no_graph(run: PhaseRun, compiled: CompiledTarget) -> Iterator[Finding]:
    """Find that a target that was called has no compiled graph, unless an event tells it."""
    key = compiled.key
    of_target = [event for event in run.events(candidate=key.candidate) if event.target == key.target]
    if not any(event.kind in ("fallback", "eager_call") or event.graphs for event in of_target):
        reason = compiled.why_no_graph
        message = f"target {key.target!r} ran in the {key.phase} phase without a compiled graph: {reason}"
        is_told = _torch.dynamo.is_disabled()
        yield Finding("CC101", "" if is_told else message, key[:2], ("eager_call", key, reason))


def small_share(run: PhaseRun, compiled: CompiledTarget) -> Iterator[Finding]:
    """Find that graph breaks may leave most of a target eager, unless a fallback is the reason."""
    key, counts = compiled.key, compiled.backend.weights_in_graphs
    if counts is None or not compiled.backend.graphs or counts[0] >= LEAST_SHARE * counts[1]:
        return
    kinds = "graph_break", "fallback"
    events = [e for e in run.events(*kinds, candidate=key.candidate) if e.target == key.target]
    if not events or any(event.kind != "graph_break" for event in events):
        return
    where = f" ({events[0].file}:{events[0].line})" if events[0].file else ""
    message = (
        f"the compiled graphs of target {key.target!r} use {counts[0]} of its {counts[1]} weights "
        f"({counts[0] / counts[1]:.0%}) in the {key.phase} phase, so its other layers run eagerly or are not used. "
        f"The first graph break: {short_reason(events[0].reason or '')}{where}. If the other layers run, compile "
        "only the parts that torch can trace, or leave the phase eager"
    )
    yield Finding("CC131", message, key[:2])


def slow_steps(run: PhaseRun) -> Iterator[Finding]:
    """Find that the compiled steps are slower than eager steps, by the rule of the report's verdict and by 5%."""
    times = run.times.times(run.chosen.name)
    comparison = times.comparison
    if comparison is None or comparison.outcome != "slower" or comparison.ratio > MAX_UNWARNED_RATIO:
        return
    figures = f"{median_ms(times.compiled_ms):.2f} ms, eager {median_ms(times.eager_ms):.2f} ms"
    of_kind = (run.events(kind, candidate=run.chosen.name) for kind in _CAUSES)
    cause = next((found[0 if found[0].kind == "graph_break" else -1] for found in of_kind if found), None)
    message = (
        f"compiled {run.phase} steps are slower than eager steps ({figures}). {_describe(cause)}. "
        f"{run.phase}_mode='eager' leaves the phase eager"
    )
    yield Finding("CC501", message, (run.phase, cause and (cause.kind, cause.reason)))


def _describe(cause: CompileEvent | None) -> str:
    if cause is None:
        return "torch reports no cause. Other programs that use the machine are a possible cause"
    reason = short_reason(cause.reason or "torch gives no reason")
    which = "first" if cause.kind == "graph_break" else "last"
    event = f"the {which} {cause.kind.replace('_', ' ')} of target {cause.target!r} ({reason})"
    return f"Possible causes are {event}, and other programs that use the machine"


def of_stage(run: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool, sharded: bool) -> Iterator[Finding]:
    """Find everything about a phase at the end of a stage. Of its targets, those that its steps called."""
    yield from recompile_limits(run)
    yield from nothing_called(run, switch, finds_targets=finds_targets)
    for compiled in switch.compiled_targets(run.phase) if run.chosen.config is not None else ():
        if compiled.called and not compiled.backend.waits:
            for kind, _, reason in settings_without_effect(run, sharded=sharded):
                yield Finding(event=(kind, compiled.key, reason))
            for find in (no_graph, small_share, unfrozen):
                yield from find(run, compiled)
    yield from slow_steps(run)


def never_called(switch: PhaseSwitch) -> Iterator[Finding]:
    """Find each named target that no phase called."""
    called = switch.called_targets("train") | switch.called_targets("infer")
    for target in switch.targets if called and _torch.dynamo.has_call_slot() else ():
        if target.name not in called:
            message = f"target {target.name!r} was never called, so it is not compiled. {NAME_OTHERS}"
            yield Finding("CC102", message, target.name)


def at_begin(*, background: bool) -> Iterator[Finding]:
    """Find settings of torch that change the run."""
    if _torch.dynamo.is_disabled():
        message = "TORCH_COMPILE_DISABLE is set, so torch compiles nothing, and all steps run eagerly"
        yield Finding("CC101", message, "disabled")
    elif not _torch.dynamo.has_call_slot():
        message = f"torch {torch.__version__} calls modules in another way, so nothing is compiled"
        yield Finding("CC309", message, "call slot")
    if background and torch.are_deterministic_algorithms_enabled():
        message = (
            "background=True: the clock decides which step first runs compiled code, so two runs differ by rounding "
            "errors, although deterministic algorithms are enabled"
        )
        yield Finding("CC204", message, "background")


def unused_cache(events: Sequence[CompileEvent]) -> Iterator[Finding]:
    """Find that torch cached no compiled graph."""
    if any(event.graphs for event in events) and not any(event.cache_hits or event.cache_misses for event in events):
        message = "cache_dir has no effect: torch did not use its cache, which is disabled or bypassed"
        yield Finding("CC204", message, "cache_dir")
