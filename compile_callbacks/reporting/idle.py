"""What was asked for and has no effect: settings, and targets that nothing was compiled of."""

from __future__ import annotations

from collections.abc import Iterator

from compile_callbacks.compiling.sharding import MOVING_WEIGHTS
from compile_callbacks.measuring.events import CompileRecorder, Owner
from compile_callbacks.phases import Phase
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.warm_start.warm_start import WarmStart


def idle_cudagraphs(phase: Phase, config: InductorConfig | None, *, cuda: bool) -> Iterator[str]:
    """Say that CUDA graphs are asked for where they cannot be had."""
    if config is not None and config.uses_cudagraphs and not cuda:
        yield f"{phase}_mode={config.describe()!r} asks for CUDA graphs, and the module is not on a GPU"


def idle_freezing(phase: Phase, config: InductorConfig | None, *, shared: bool, sharded: bool) -> Iterator[str]:
    """Say that weights were to be baked in that are shards, or into graphs that several modules share."""
    if phase != "infer" or config is None or not config.freezes or not (shared or sharded):
        return
    own = "repeated blocks share a graph, and each has weights of its own"
    why = MOVING_WEIGHTS if sharded else own
    yield f"{phase}_mode={config.describe()!r} asks for freezing, which has no effect: {why}"


def differing_blocks(owner: Owner, recorder: CompileRecorder) -> str:
    """Say that repeated blocks needed a graph each, and why as far as torch tells."""
    reasons = [event.reason for event in recorder.of(owner.phase, "recompile") if event.target == owner.target]
    why = f"; torch compiled the last one anew for {reasons[-1]!r}" if reasons and reasons[-1] else ""
    return (
        f"blocks {owner.target!r} share no graph in the {owner.phase} phase, each was compiled by itself: they differ "
        f"in what torch takes for constant, a number that a module holds for example{why} (all reasons: "
        f"callback.report.{owner.phase}.events)"
    )


def idle_folding(phase: Phase, config: InductorConfig | None, recorder: CompileRecorder) -> Iterator[str]:
    """Say that weights were to be folded, and no graph that was compiled so far has such."""
    folds = recorder.of(phase, "fold")
    if config is None or not config.fold_weights or any(event.folded_mb is not None for event in folds):
        return
    if any(event.graphs for event in recorder.of(phase, "compile")):
        reasons = [event.reason for event in folds if event.reason]
        nothing = "no inference graph computes from weights alone what is worth keeping"
        yield f"fold_weights=True has no effect in the {phase} phase: {reasons[-1] if reasons else nothing}"


def idle_cache_dir(warm_start: WarmStart, recorder: CompileRecorder) -> Iterator[str]:
    """Say that nothing could be kept of what was compiled."""
    events = recorder.events
    if warm_start.idle and any(event.graphs for event in events) and not any(event.cache_hits for event in events):
        yield (
            "cache_dir has no effect: torch kept nothing of what it compiled. Its caches are off, or the settings "
            "keep it from using them (freezing, and passes whose uuid() is None, do)"
        )


def limits_reached(recorder: CompileRecorder) -> Iterator[tuple[Owner, str]]:
    """Say which targets torch compiles for no further inputs."""
    for owner, reason in recorder.limits_hit.items():
        message = (
            f"target {owner.target!r} reached torch's recompile limit in the {owner.phase} phase, and runs eagerly "
            f"wherever no graph fits that it has; the last reason to compile anew: {reason} (all of them: "
            f"callback.report.{owner.phase}.events; where shapes are the cause, dynamic=True in {owner.phase}_mode or "
            "fixed shapes need fewer graphs)"
        )
        yield owner, message


def why_uncompiled(owner: Owner, recorder: CompileRecorder) -> str | None:
    """Say that a target that ran has no compiled graph; ``None`` where it has one, or is known to have fallen back."""
    for event in recorder.events:
        ours = (event.target, event.phase, event.settings) == (owner.target, owner.phase, owner.settings)
        if ours and (event.kind == "fallback" or event.graphs):
            return None
    breaks = [e.reason for e in recorder.of(owner.phase, "graph_break") if e.target == owner.target and e.reason]
    reason = breaks[-1] if breaks else "torch gives no reason; nothing in it may be there to compile"
    return f"target {owner.target!r} ran in the {owner.phase} phase without a compiled graph: {reason}"
