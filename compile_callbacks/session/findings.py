"""Functions that find problems of a `PhaseRun`. A `Session` records them and warns about them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.profiling.events import CompileKey, EventKind
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.sentences import describe_verdict
from compile_callbacks.session.phase_run import PhaseRun

NAME_OTHERS = "Name the modules or methods that the steps call in targets=[...]"


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
    config, device, sharded = run.chosen.config, run.conditions.device, run.conditions.sharded
    if config is None or run.chosen.name is not None:  # nobody asked for a candidate of "auto"
        return
    mode, key = f"{mode_argument}={config.describe()!r}", CompileKey("the module", run.phase)
    if (reason := config.template_falls_back(device)) is not None:
        yield Finding("CC204", f"{mode_argument}: {reason}", (run.phase, "template"), ("template", key, reason))
    if run.phase == "infer" and config.freezes and sharded:
        message = f"{mode} asks for freezing, which has no effect: {sharded}"
        yield Finding("CC204", message, "freezing", ("freezing", key, message))
    if config.uses_cudagraphs and device.type != "cuda":
        message = f"{mode} asks for CUDA graphs, and the module is not on a GPU, so they have no effect"
        yield Finding("CC204", message, (run.phase, "CUDA graphs"), ("cudagraph_skip", key, message))


def of_stage(run: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool) -> Iterator[Finding]:
    """Find targets at the end of a stage that were not called, or that ran eagerly."""
    phase, chosen = run.phase, run.chosen
    for event in run.events("fallback", candidate=chosen.name):
        if event.code == "CC103":
            advice = "keep this value constant, or name parts of the target that do not read it in targets=[...]"
            message = f"target {event.target!r} reached torch's recompile limit in the {phase} phase, so inputs that no"
            message += f" graph accepts run eagerly: {event.reason}; {event.fix or advice}"
            yield Finding("CC103", message, (event.target, phase, event.candidate))
    if chosen.config is None:
        return
    # Without a target that torch can compile, each named target gets its own warning.
    is_called = switch.called_targets(phase) or not (switch.targets or finds_targets)
    if not is_called and _torch.dynamo.has_call_slot() and run.times.steps(chosen.name):
        names = ", ".join(repr(target.name) for target in switch.targets) or "none was found"
        message = f"nothing is compiled in the {phase} phase, because its steps call none of the targets ({names})"
        yield Finding("CC102", f"{message}. {NAME_OTHERS}", phase)
    for compiled in switch.compiled_targets(phase):
        key, reason = compiled.key, compiled.why_no_graph
        events = [event for event in run.events(candidate=key.candidate) if event.target == key.target]
        if not compiled.called or compiled.backend.waits:
            continue
        if not any(event.graphs or event.kind in ("fallback", "eager_call") for event in events):
            message = f"target {key.target!r} ran in the {phase} phase without a compiled graph: {reason}"
            message = "" if _torch.dynamo.is_disabled() else message
            yield Finding("CC101", message, key[:2], ("eager_call", key, reason))
        if chosen.name is None and chosen.config.freezes and not (compiled.backend.frozen or run.conditions.sharded):
            reason = "freezing has no effect while weights may change, as during fit"
            yield Finding(event=("freezing", key, reason))  # no warning, because `validate` may freeze it later


def slow_steps(phase: Phase, report: PhaseReport) -> Iterator[Finding]:
    """Find that the compiled steps are slower than eager steps, by the rule of the report's verdict and by 5%."""
    if report.verdict == "slower" and (report.speedup or 1.0) <= 0.95:
        message = f"compiled {phase} steps are slower than eager steps so far: {describe_verdict(phase, report)}"
        yield Finding("CC501", message, phase)


def of_run(train: PhaseRun, switch: PhaseSwitch, *, finds_targets: bool) -> Iterator[Finding]:
    """Find at the end of a run that no step called a named target."""
    called = switch.called_targets("train") | switch.called_targets("infer")
    is_wrong = called and not finds_targets and train.times.number and _torch.dynamo.has_call_slot()
    for target in switch.targets if is_wrong else ():
        if target.name not in called:
            message = f"target {target.name!r} was never called, so it is not compiled. {NAME_OTHERS}"
            yield Finding("CC102", message, target.name)
