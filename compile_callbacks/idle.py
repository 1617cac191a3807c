"""Settings that were asked for and have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from compile_callbacks.config import InductorConfig
from compile_callbacks.events import CompileRecorder
from compile_callbacks.phases import Phase


def idle_cudagraphs(phase: Phase, config: InductorConfig | None, *, cuda: bool) -> Iterator[str]:
    """Say that CUDA graphs are asked for where they cannot be had."""
    if config is not None and config.uses_cudagraphs and not cuda:
        yield f"{phase}_mode={config.describe()!r} asks for CUDA graphs, and the module is not on a GPU"


def idle_folding(phase: Phase, config: InductorConfig | None, recorder: CompileRecorder) -> Iterator[str]:
    """Say that weights were to be folded, and no graph that was compiled so far has such."""
    folds = recorder.of(phase, "fold")
    if config is None or not config.fold_weights or any(event.folded_mb is not None for event in folds):
        return
    if any(event.graphs for event in recorder.of(phase, "compile")):
        reasons: Sequence[str] = [event.reason for event in folds if event.reason]
        nothing = "no inference graph computes from weights alone what is worth keeping"
        yield f"fold_weights=True has no effect in the {phase} phase: {reasons[-1] if reasons else nothing}"
