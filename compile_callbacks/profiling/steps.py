"""`Stage`, `Step` and `Workload`: a stage of a run, a step of the stage, and the conditions of the step."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import TensorSignature
from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling.spans import Span

StepKind = Literal["eager", "compiled"]
"""The kind of a step. A step is compiled if a compiled graph of this library ran in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a Trainer run.

    Attributes:
        phase: The phase, train or infer.
        eager: Whether its steps run eagerly and are not measured, as in the sanity check.
        weights_frozen: Whether the weights are constant during the stage, so that compiled code may contain them.
    """

    phase: Phase = "train"
    eager: bool = False
    weights_frozen: bool = False


class Workload(NamedTuple):
    """The conditions of a step. Two steps can be compared if their workloads are equal.

    ``kind`` contains gradient accumulation, the structure and dtypes of the batch, and the set of trained weights.
    """

    stage: str  # the stage and the number of its dataloader
    kind: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class Step:
    """One step: the processing of one batch, from its start to its end. The last attributes are known at its end.

    Attributes:
        variant: The variant that the policy chose.
        first: Whether the step is the first step of its stage or epoch.
        began: The time of the start, in seconds of `clock.now`.
        compiles_seen: The recorder's number of compiles at the start.
        traces_seen: The same without recordings of CUDA graphs.
        graphs: The recorder's number of executed graphs at the start.
        number: The number of the step in its phase, for steps that are only counted.
        kind: Whether compiled graphs ran in the step.
        mixed: Whether a call ran eagerly although its target has a compiled graph.
        compiling: Whether torch compiled during the step.
        traced: Like ``compiling``, but recording a CUDA graph does not count.
        span: The time of the step, or ``None`` if the step is not timed.
        workload: The workload of a timed step.
        is_sample: Whether the time of the step may be compared with other steps of the workload.
    """

    variant: Variant = EAGER_VARIANT
    first: bool = False
    began: float = 0.0
    compiles_seen: int = 0
    traces_seen: int = 0
    graphs: int = 0
    number: int = 0
    kind: StepKind = "eager"
    mixed: bool = False
    compiling: bool = False
    traced: bool = False
    span: Span | None = None
    workload: Workload | None = None
    is_sample: bool = False


@functools.lru_cache(maxsize=1024)  # because each timed step calls this, and small steps are CPU-bound
def workload_of(stage: str, conditions: str, batch_signature: Any) -> Workload:
    """Return the workload of a step from the signature of its batch."""
    shapes: list[tuple[int, ...]] = []
    kind = _without_sizes(batch_signature, shapes)
    return Workload(stage, f"{conditions}, {kind!r}" if conditions else repr(kind), tuple(shapes))


def _without_sizes(batch_signature: Any, shapes: list[tuple[int, ...]]) -> Any:
    """Return a signature without sizes and repeated entries, and append the sizes to ``shapes``."""
    if isinstance(batch_signature, TensorSignature):
        shapes.append(batch_signature.shape)
        return batch_signature._replace(shape=(0,) * len(batch_signature.shape))
    if not isinstance(batch_signature, tuple):
        return batch_signature
    without_sizes = [_without_sizes(entry, shapes) for entry in batch_signature]
    if all(isinstance(entry, type) for entry in batch_signature):  # no tensors, for example a list of strings
        shapes.append((len(batch_signature),))
    return tuple(dict.fromkeys(without_sizes))
