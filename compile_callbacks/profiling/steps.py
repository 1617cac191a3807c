"""`Stage` and `Step`: one stage of a run, and one step of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.variant import EAGER_VARIANT, Variant
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.workload import Workload

StepKind = Literal["eager", "partly compiled", "compiled"]
"""The kind of a step, by the code that ran in it.

- ``"compiled"``: compiled graphs.
- ``"partly compiled"``: compiled graphs, and also a call of a target that ran eagerly.
- ``"eager"``: no compiled graph of this library.
"""


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


@dataclass(slots=True, kw_only=True)
class Step:
    """One step: the processing of one batch, from its start to its end. The last attributes are known at its end.

    Attributes:
        variant: The variant that the policy chose.
        first: Whether the step is the first step of its stage or epoch.
        began: The time of the start, in seconds of `time.perf_counter`.
        compiles_seen: The recorder's number of compiles at the start.
        traces_seen: The same without recordings of CUDA graphs.
        graphs: The recorder's number of executed graphs at the start.
        eager_calls: The recorder's number of eager calls at the start.
        number: The number of the step in its phase, for steps that are only counted.
        kind: Whether compiled graphs and eager targets ran in the step.
        compiling: Whether torch compiled during the step.
        traced: Like ``compiling``, but recording a CUDA graph does not count.
        span: The time of the step, or ``None`` if the step is not timed.
        workload: The workload of a timed step.
        is_sample: Whether the time of the step may be compared with other steps of the workload.
    """

    variant: Variant = EAGER_VARIANT
    first: bool = False
    began: float = field(default_factory=time.perf_counter)
    compiles_seen: int = 0
    traces_seen: int = 0
    graphs: int = 0
    eager_calls: int = 0
    number: int = 0
    kind: StepKind = "eager"
    compiling: bool = False
    traced: bool = False
    span: Span | None = None
    workload: Workload | None = None
    is_sample: bool = False
