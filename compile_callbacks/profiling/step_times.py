"""`PhaseTimes`: times the steps of a phase, and decides which step times are samples.

A *sample* is the time of a step that may be compared with other samples.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks._utils.phases import EAGER, WAITING, Phase
from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling.clock import Span
from compile_callbacks.profiling.comparison import MIN_SAMPLES, Comparison, compare

WARMUP_STEPS = 2
"""The number of steps without a sample after a compile, and after a change between eager and compiled. In these steps,
allocators and cuDNN warm up. torch warms up a CUDA graph in its first call, and records it in the second call."""

WINDOW_STEPS = 10
"""The number of steps in a window, as many as the eager baseline has by default."""

MAX_WINDOWS = 32
"""The number of windows after which a record drops every second window."""

_MAX_UNREAD = 64  # the number of unread CUDA events after which those that the GPU has passed are read

StepKind = Literal["eager", "compiled"]
"""The kind of a step. A step is compiled if a compiled graph of this library ran in it."""


class Workload(NamedTuple):
    """The conditions of a step. Two steps can be compared if their workloads are equal."""

    stage: str  # the stage and the number of its dataloader
    kind: str = ""  # gradient accumulation, precision, and the set of trained weights
    shapes: Any = ()  # the signature of the batch: its structure, and the shapes and dtypes of its tensors


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One step: the processing of one batch, from its start to its end."""

    variant: Variant = EAGER_VARIANT  # that the policy chose
    first: bool = False  # of its stage or epoch
    wanted: bool = False  # whether the policy wants the time of the step
    repeats: bool = False  # whether it stands for further steps, which are only counted
    began: float = 0.0  # the time of the start, in seconds of `clock.now`
    compiles: int = 0  # the recorder's number of compiles at the start
    graphs_before: int = 0  # the recorder's number of executed graphs at the start
    # Known at the end of the step:
    kind: StepKind = "eager"
    mixed: bool = False  # whether a call ran eagerly although its target has a compiled graph
    compiling: bool = False  # whether torch compiled during the step
    number: int = 0  # in the phase, from 1
    workload: Workload | None = None  # of a timed step
    is_sample: bool = False  # whether its time may be compared with other steps of the workload
    span: Span | None = None  # the time of the step, or ``None`` if the step is not timed
    ms: float | None = None  # the same, after the GPU has passed the end


class StepTimes(NamedTuple):
    """Step times of equal workload, eager and compiled."""

    eager_ms: tuple[float, ...] = ()  # eager samples, in milliseconds
    windows: tuple[tuple[float, ...], ...] = ()  # compiled samples, in the windows in which they were measured
    workload: Workload | None = None  # ``None`` if there are no samples

    @property
    def compiled_ms(self) -> tuple[float, ...]:
        """Compiled samples, in milliseconds."""
        return tuple(itertools.chain(*self.windows))

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of the eager steps with the compiled steps, or ``None`` for too few samples."""
        return compare([self.eager_ms], self.windows)

    @property
    def saved_share(self) -> float | None:
        """The saved time of a compiled step divided by its time, or ``None`` if the steps cannot be compared."""
        comparison = self.comparison
        is_doubtful = comparison is not None and comparison.outcome == "not comparable"
        if not self.windows or len(self.eager_ms) < MIN_SAMPLES or is_doubtful:
            return None
        return statistics.median(self.eager_ms) / statistics.median(self.compiled_ms) - 1


class Savings(NamedTuple):
    """The time that compiling saved so far."""

    net_seconds: float  # the time saved by all steps, including steps in which torch compiled
    break_even_steps: float  # the compiled steps after which the net is positive; infinite if steps save no time


class _Key(NamedTuple):
    """What the steps of a record have in common."""

    variant: str | None
    kind: StepKind
    compiling: bool
    stage: str  # the stage and the number of its dataloader


class _Record:
    """The steps of one kind in one stage. The timed steps are in windows that are spread evenly over the run.

    A window contains steps that run after each other, like the eager baseline. With `MAX_WINDOWS` windows, the record
    drops every second window, and doubles the distance of further windows. This distance is odd, because with gradient
    accumulation every second or fourth step differs from the others, and windows must not always begin with the same.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.ms = 0.0  # of the timed steps
        self.windows: list[list[Step]] = [[]]
        self.untimed_left = 0  # the number of the next steps that need no timing
        self._distance = 1  # of the begins of two windows, in windows

    def add(self, timed: Step) -> None:
        """Add a timed step, unless it is between two windows."""
        if self.untimed_left:  # a policy wanted the time
            self.untimed_left -= 1
            return
        self.windows[-1].append(timed)
        if len(self.windows[-1]) == WINDOW_STEPS:
            self.untimed_left = (self._distance - 1) * WINDOW_STEPS + (self._distance > 1)
            if len(self.windows) == MAX_WINDOWS:
                self.windows = self.windows[::2]
                self._distance *= 2
            self.windows.append([])


class PhaseTimes:
    """Times the steps of a phase, and keeps the samples, as docs/reference/measuring.md describes.

    On a GPU, CUDA events measure the steps, and are read after the GPU has passed them, so that nothing synchronizes
    training.
    """

    def __init__(self, phase: Phase = "train") -> None:
        self.number = 0
        """The number of finished steps."""
        self.last = _Record()
        """The record of the last step. The next step is like it if nothing changes. Its ``untimed_left`` counts steps
        that need no timing: two CUDA events take 50 µs to 250 µs of CPU time, and reading the batch takes 10 µs."""
        self._phase = phase
        self._records: defaultdict[_Key, _Record] = defaultdict(_Record)
        self._shapes: set[int] = set()  # hashes of the shapes that the steps of a variant had
        self._since_compile: Counter[str | None] = Counter()  # steps of each variant
        self._variant: str | None = EAGER  # of the last step
        self._unread: deque[tuple[_Record, Step]] = deque()

    # ------------------------------------------------------------------------------------------ a step

    def begin(self, step: Step, device: torch.device) -> None:
        """Begin a step."""
        if step.wanted or not self.last.untimed_left:
            step.span = Span(device)
        else:
            self.last.untimed_left -= 1

    def end(self, step: Step, stage: str) -> None:
        """End a step, and set whether its time is a sample."""
        self.number += 1
        step.number = self.number
        record = self._records[_Key(step.variant.name, step.kind, step.compiling, stage)]
        record.steps += 1
        is_warm = self._is_warm(step)
        if not step.compiling:
            self.last = record
        elif step.span is None:
            step.span = Span(start=step.began)
        if step.span is None:
            return
        workload = None if step.compiling else step.workload
        step.span.stop(phase=self._phase, candidate=step.variant.name, workload=workload)
        # A step that ran eagerly although its variant compiles is a sample of neither, and nor is a mixed step.
        is_of_kind = not step.mixed and (step.kind != "eager" or step.variant.config is None)
        # For new shapes, libraries select kernels, which may take longer than the step (as for attention on a GPU).
        is_known = workload is not None and self._is_known(step, workload.shapes)
        step.is_sample = is_warm and is_known and is_of_kind
        record.add(step)
        self._unread.append((record, step))
        if len(self._unread) > _MAX_UNREAD:
            self._read(wait=False)

    def _is_warm(self, step: Step) -> bool:
        """Count a step of a variant, and return whether it is no longer a warm-up step."""
        since, variant = self._since_compile, step.variant.name
        if variant != self._variant:
            since[variant] = min(since[variant], WARMUP_STEPS - 1)
        self._variant = variant
        since[variant] = 0 if step.compiling else since[variant] + 1
        return since[variant] > WARMUP_STEPS

    def _is_known(self, step: Step, shapes: Any) -> bool:
        """Return whether an earlier step of the same kind had these shapes."""
        key = hash((step.variant.name, step.kind, shapes))
        is_known = not shapes or key in self._shapes
        self._shapes.add(key)  # of timed steps only, whose number is limited
        return is_known

    # ------------------------------------------------------------------------------------------ results

    def synchronize(self) -> None:
        """Wait for the GPU, and read all steps so far. Without it, the figures omit steps that the GPU still runs."""
        self._read(wait=True)

    def steps(self, variant: str | None = None) -> Counter[StepKind]:
        """Return the number of steps of a variant by kind, including steps without a sample."""
        steps: Counter[StepKind] = Counter()
        for key, record in self._records.items():
            if key.variant == variant:
                steps[key.kind] += record.steps
        return steps

    def windows(
        self, variant: str | None = None, kind: StepKind = "compiled"
    ) -> dict[Workload, tuple[tuple[float, ...], ...]]:
        """Return the samples in milliseconds by workload, in windows, the latest workload last."""
        self._read(wait=False)
        by_workload: dict[Workload, tuple[tuple[float, ...], ...]] = {}
        for key, record in self._records.items():
            for window in record.windows if key[:3] == (variant, kind, False) else ():
                of_window: defaultdict[Any, list[float]] = defaultdict(list)
                for step in window:
                    if step.is_sample and step.ms is not None:
                        of_window[step.workload].append(step.ms)
                for workload, ms in of_window.items():
                    by_workload[workload] = (*by_workload.pop(workload, ()), tuple(ms))
        return by_workload

    def times(self, variant: str | None = None) -> StepTimes:
        """Return the eager and compiled step times of the workload that has the most compiled samples.

        If several workloads have the same number, the latest is returned.
        """
        eager, compiled = self.windows(EAGER, "eager"), self.windows(variant)
        counts = {workload: sum(map(len, windows)) for workload, windows in (compiled or eager).items()}
        if not counts:
            return StepTimes()
        workload = max(reversed(counts), key=counts.__getitem__)
        return StepTimes(tuple(itertools.chain(*eager.get(workload, ()))), compiled.get(workload, ()), workload)

    def savings(self, variant: str | None = None, other_seconds: float = 0.0) -> Savings | None:
        """Return the time that compiled steps saved, or ``None`` without a factor between eager and compiled steps.

        Each compiled step saves the same share of its time: the share by which the medians of `times` differ. So the
        speedup, the net seconds and the break-even have the same sign. In a stage without eager steps, only the steps
        in which torch compiled count. The break-even is about steps of ``variant``. The time that steps of other
        candidates of a `Tune` lost is a cost, like ``other_seconds``.
        """
        reported = self.times(variant)
        if len(reported.eager_ms) < MIN_SAMPLES or (reported.windows and reported.saved_share is None):
            return None
        eager_ms, cost_ms, saved_ms, count = self._typical_ms(EAGER, "eager"), other_seconds * 1000, 0.0, 0
        for key, record in self._records.items():
            typical_ms = self._typical_ms(key.variant, key.kind).get(key.stage, 0.0)
            if key.compiling:
                cost_ms += record.ms - record.steps * eager_ms.get(key.stage, 0.0)
            elif key.variant == WAITING and typical_ms:
                cost_ms += record.steps * (typical_ms - eager_ms.get(key.stage, 0.0))
            elif key.kind != "eager" and key.stage in eager_ms:
                saved = record.steps * typical_ms * (self.times(key.variant).saved_share or 0.0)
                if key.variant == variant:
                    saved_ms, count = saved_ms + saved, count + record.steps
                else:
                    cost_ms -= saved
        break_even_steps = max(0.0, cost_ms * count / saved_ms) if saved_ms > 0 else math.inf
        return Savings((saved_ms - cost_ms) / 1000, break_even_steps)

    def _typical_ms(self, variant: str | None, kind: StepKind) -> dict[str, float]:
        """Return the mean over the steps of each stage, in which each step counts with the median of its workload."""
        of_stage: defaultdict[str, list[float]] = defaultdict(list)
        for workload, windows in self.windows(variant, kind).items():
            ms = list(itertools.chain(*windows))
            of_stage[workload.stage] += [statistics.median(ms)] * len(ms)
        return {stage: statistics.fmean(ms) for stage, ms in of_stage.items()}

    def series(self) -> tuple[dict[str, Any], ...]:
        """Return the step times as one mapping for each kind of step and candidate.

        A mapping contains ``kind`` (a `StepKind`, or ``"compiling"`` if torch compiled during the steps), ``candidate``
        (if the phase has a `Tune`), ``steps`` (numbers of steps in the phase, from 1) and ``ms``. In a long run, the
        lists contain windows of steps that are spread evenly over the run.
        """
        self._read(wait=False)
        points: defaultdict[tuple[str, str | None], list[tuple[int, float]]] = defaultdict(list)
        for key, record in self._records.items():
            kind, candidate = "compiling" if key.compiling else key.kind, None if key.variant == EAGER else key.variant
            timed = itertools.chain(*record.windows)
            points[kind, candidate] += [(s.number, float(f"{s.ms:.4g}")) for s in timed if s.ms is not None]
        return tuple(
            {"kind": kind, "candidate": candidate, "steps": [n for n, _ in ordered], "ms": [ms for _, ms in ordered]}
            for (kind, candidate), unsorted in points.items()
            if (ordered := sorted(unsorted))
        )

    def _read(self, *, wait: bool) -> None:
        while self._unread:
            record, step = self._unread[0]
            assert step.span is not None
            if not (wait or step.span.passed()):
                break
            self._unread.popleft()
            step.ms = step.span.milliseconds()
            record.ms += step.ms
