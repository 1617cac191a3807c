"""Functions that find problems of a `PhaseRun`. A `Session` records them and warns about them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.compiled_target import CompiledTarget
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.profiling.events import CompileEvent, CompileKey, EventKind
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.sentences import describe_verdict
from compile_callbacks.session.phase_run import PhaseRun

MAX_UNWARNED_RATIO = 0.95
"""The speedup above which slower steps are not worth a warning."""

LEAST_SHARE = 0.2
"""The share of a target's weights that its graphs must use. With a smaller share, most of it may run eagerly."""

NAME_OTHERS = (
    "Name the modules or methods that the steps call in targets=[...]. A call inside a function that you compiled with "
    "torch.compile belongs to the graph of that function"
)


class Finding(NamedTuple):
    """Something that the user should know."""

    code: str = ""  # of the warning
    message: str = ""  # of the warning, or "" if the report alone tells it
    about: Hashable = None  # each warning is issued once for each subject
    event: tuple[EventKind, CompileKey, str] | None = None  # to record, if no event tells it yet


def at_begin() -> Iterator[Finding]:
    """Find settings of torch that change the run."""
    if _torch.dynamo.is_disabled():
        message = "TORCH_COMPILE_DISABLE is set, so torch compiles nothing, and all steps run eagerly"
        yield Finding("CC101", message, "disabled")
    elif not _torch.dynamo.has_call_slot():
        message = f"torch {torch.__version__} calls modules in another way, so nothing is compiled"
        yield Finding("CC309", message, "call slot")


def without_effect(run: PhaseRun, mode_argument: str) -> Iterator[Finding]:
    """Find settings of the chosen config that have no effect on this module and this device."""
    config, (device, _, sharded, *_) = run.chosen.config, run.conditions
    if config is None or run.chosen.name is not None:  # nobody asked for a candidate of "auto"
        return
    mode, key = f"{mode_argument}={config.describe()!r}", CompileKey("the module", run.phase)
    if (reason := config.template_falls_back(device)) is not None:
        yield Finding("CC204", f"{mode_argument}: {reason}", (run.phase, "template"), ("template", key, reason))
    if run.phase == "infer" and config.freezes and sharded:
        message = f"{mode} asks for freezing, which has no effect: {sharded}"
        yield Finding("CC204", message, "freezing", ("freezing", key, message))
    if config.uses_cudagraphs and device.type != "cuda":
        message = (
            f"{mode} asks for CUDA graphs, and the module is not on a GPU: they have no effect. The steps run compiled "
            "without them"
        )
        reason = f"{config.describe()!r} asks for CUDA graphs, which have no effect on a {device.type.upper()}"
        yield Finding("CC204", message, (run.phase, "CUDA graphs"), ("cudagraph_skip", key, reason))


def of_stage(run: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool) -> Iterator[Finding]:
    """Find everything about a phase at the end of a stage."""
    yield from _recompile_limits(run)
    # Without a target that torch can compile, each named target gets its own warning.
    called = switch.called_targets(run.phase) or not (switch.targets or finds_targets)
    called = called or not _torch.dynamo.has_call_slot()
    if run.chosen.config is not None and not called and run.times.steps(run.chosen.name):
        names = ", ".join(repr(target.name) for target in switch.targets) or "none was found"
        message = (
            f"nothing is compiled in the {run.phase} phase, because its steps call none of the targets ({names}). "
            f"{NAME_OTHERS}"
        )
        yield Finding("CC102", message, run.phase)
    for compiled in switch.compiled_targets(run.phase) if run.chosen.config is not None else ():
        if compiled.called and not compiled.backend.waits:
            yield from _of_target(run, compiled)


def _recompile_limits(run: PhaseRun) -> Iterator[Finding]:
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


def _of_target(run: PhaseRun, compiled: CompiledTarget) -> Iterator[Finding]:
    """Find that a target that was called has no graph, that its graphs are a small part of it, or are not frozen."""
    key, counts, config = compiled.key, compiled.backend.weights_in_graphs, run.chosen.config
    events = [event for event in run.events(candidate=key.candidate) if event.target == key.target]
    failures = [event for event in events if event.kind in ("fallback", "eager_call")]
    if not failures and not any(event.graphs for event in events):
        reason = compiled.why_no_graph
        message = f"target {key.target!r} ran in the {key.phase} phase without a compiled graph: {reason}"
        is_told = _torch.dynamo.is_disabled()
        yield Finding("CC101", "" if is_told else message, key[:2], ("eager_call", key, reason))
    breaks = [event for event in events if event.kind == "graph_break"]
    is_small = counts is not None and compiled.backend.graphs and counts[0] < LEAST_SHARE * counts[1]
    if counts and is_small and breaks and not any(event.kind == "fallback" for event in failures):
        where = f" ({breaks[0].file}:{breaks[0].line})" if breaks[0].file else ""
        message = (
            f"the compiled graphs of target {key.target!r} use {counts[0]} of its {counts[1]} weights "
            f"({counts[0] / counts[1]:.0%}) in the {key.phase} phase, so its other layers run eagerly or are not used. "
            f"The first graph break: {short_reason(breaks[0].reason or '')}{where}. If the other layers run, compile "
            "only the parts that torch can trace, or leave the phase eager"
        )
        yield Finding("CC131", message, key[:2])
    may_freeze = run.chosen.name is None and not run.conditions.sharded
    if may_freeze and config is not None and config.freezes and not compiled.backend.frozen:
        reason = "freezing has no effect while weights may change, as during fit"
        yield Finding(event=("freezing", key, reason))  # no warning, because `validate` may freeze it later


def slow_steps(phase: Phase, report: PhaseReport) -> Iterator[Finding]:
    """Find that the compiled steps are slower than eager steps, by the rule of the report's verdict and by 5%."""
    if report.verdict == "slower" and (report.speedup or 1.0) <= MAX_UNWARNED_RATIO:
        message = f"compiled {phase} steps are slower than eager steps: {describe_verdict(phase, report)}"
        yield Finding("CC501", message, phase)


def of_run(train: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool) -> Iterator[Finding]:
    """Find at the end of a run that no step called a named target."""
    called = switch.called_targets("train") | switch.called_targets("infer")
    is_wrong = called and not finds_targets and train.times.number and _torch.dynamo.has_call_slot()
    for target in switch.targets if is_wrong else ():
        if target.name not in called:
            message = f"target {target.name!r} was never called, so it is not compiled. {NAME_OTHERS}"
            yield Finding("CC102", message, target.name)


def unused_cache(events: Sequence[CompileEvent]) -> Iterator[Finding]:
    """Find that torch cached no compiled graph."""
    if any(event.graphs for event in events) and not any(event.cache_hits or event.cache_misses for event in events):
        message = "cache_dir has no effect: torch did not use its cache, which is disabled or bypassed"
        yield Finding("CC204", message, "cache_dir")
