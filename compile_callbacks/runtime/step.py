"""`Stage` and `Step`: the stage of a Trainer run, and one batch of it, as `Session` sees them."""

from __future__ import annotations

from dataclasses import dataclass

from compile_callbacks._utils.phases import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Trainer run.

    Attributes:
        phase: Its phase.
        name: The trainer's name: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``.
        sanity: Whether it is the sanity check: its steps are eager, and no samples.
        nested: Whether a Trainer call within another one runs it: its steps are compiled, and no samples.
        weights_frozen: Whether no weight changes in it, so that the compiled code may contain the weights.
    """

    phase: Phase = "train"
    name: str = "train"
    sanity: bool = False
    nested: bool = False
    weights_frozen: bool = False


@dataclass(slots=True)
class Step:
    """A batch, from its start to its end.

    Attributes:
        first: Whether it is the first one of its stage.
        finds_targets: Whether it is eager because the modules and methods that it calls become targets.
        measured: Whether its time may be a sample.
        compiles_before: Number of compiles before it.
        traces_before: Number of compiles before it, except recordings of CUDA graphs.
        timed: Whether the timer takes its time.
        compiled: Whether it runs compiled.
        disturbed: Whether anything compiled in it; known at its end.
        traced: Whether anything except a CUDA graph recording compiled in it; known at its end.
    """

    first: bool = False
    finds_targets: bool = False
    measured: bool = False
    compiles_before: int = 0
    traces_before: int = 0
    timed: bool = False
    compiled: bool = False
    disturbed: bool = False
    traced: bool = False
