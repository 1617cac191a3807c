"""`StepTimer`: times the steps of a run for `Session`, and decides which step times are samples.

A *sample* is the time of a step that may be compared with other samples.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.profiling.comparison import Comparison, compare
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.steps import Step, StepKind, Workload

WARMUP_STEPS = 2
"""The number of steps without a sample after a compile, and after a change between eager and compiled. In these steps,
allocators and cuDNN warm up. torch warms up a CUDA graph in its first call, and records it in the second call."""

WINDOW_STEPS = 10
"""The number of steps in a window, as many as the eager baseline has by default."""

MAX_WINDOWS = 32
"""The number of windows after which the timer drops every second window."""

_MAX_SHAPES = 100_000  # the maximum number of hashes of shapes that have occurred
_MAX_UNREAD = 64  # the number of unread CUDA events after which the timer reads the events that the GPU has passed


@dataclass(frozen=True)
class StepTimes:
    """Step times of equal workload, eager and compiled.

    Attributes:
        eager_ms: Eager samples, in milliseconds.
        windows: Compiled samples, in milliseconds, in the windows in which they were measured.
        workload: The workload, or ``None`` if there are no samples.
    """

    eager_ms: tuple[float, ...] = ()
    windows: tuple[tuple[float, ...], ...] = ()
    workload: Workload | None = None

    @property
    def compiled_ms(self) -> tuple[float, ...]:
        """Compiled samples, in milliseconds."""
        return tuple(ms for window in self.windows for ms in window)

    @cached_property
    def comparison(self) -> Comparison | None:
        """The comparison of the eager steps with the compiled steps, or ``None`` for too few samples."""
        return compare([self.eager_ms], self.windows)


@dataclass(slots=True)
class _Timed:
    """A timed step. The timer reads the span later, after the GPU has passed it."""

    number: int
    workload: Workload | None  # None if the time is not a sample
    span: Span
    ms: float | None = None


class StepKey(NamedTuple):
    """The phase, the variant, the kind and the stage of the steps of a record."""

    phase: Phase
    variant: str | None
    kind: StepKind | Literal["compiling"]  # compiling: torch compiled during the step
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
        self.windows: list[list[_Timed]] = [[]]
        self.untimed_left = 0  # the number of the next steps that need no timing
        self._distance = 1  # of the begins of two windows, in windows

    @property
    def timed(self) -> Iterator[_Timed]:
        """The timed steps."""
        return itertools.chain(*self.windows)

    def add(self, timed: _Timed) -> None:
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


class StepTimer:
    """Times steps and keeps the samples.

    On a GPU, the timer uses CUDA events, and reads them after the GPU has passed them, so that it does not synchronize
    training. The time of a step is not a sample if torch compiles during the step, or if the step is the first with new
    shapes. The `WARMUP_STEPS` steps after a compile, and after a change between eager and compiled, give no sample
    either, and neither does a step in which a call ran eagerly although its target has a compiled graph. Samples are
    only compared with samples of equal workload.
    """

    def __init__(self) -> None:
        self.untimed_left = 0
        """The number of the next steps that need no timing. The caller subtracts 1 for each of them. Two CUDA events
        take 50 µs to 250 µs of CPU time, and reading the batch takes 10 µs, which delays a CPU-bound step."""
        self.passed = 0
        """The number of steps like the last step since the last call of `stop`, which are not counted yet."""
        self._numbers: Counter[Phase] = Counter()
        self._steps: Counter[tuple[Phase, str | None, StepKind]] = Counter()
        self._records: defaultdict[StepKey, _Record] = defaultdict(_Record)
        self._seen_shapes: defaultdict[tuple[Phase, str | None, StepKind], set[int]] = defaultdict(set)
        self._since_compile: Counter[tuple[Phase, str | None]] = Counter()  # steps of each variant
        self._last_variant: dict[Phase, str | None] = {}
        self._unread: deque[tuple[_Record, _Timed]] = deque()
        self._last: tuple[tuple[Phase, str | None, StepKind], _Record] | None = None  # of the last step

    # ------------------------------------------------------------------------------------------ a step

    def stop(self, phase: Phase, step: Step, stage: str) -> None:
        """End a step, and set whether its time is a sample. Delete the time if torch compiled or warmed up."""
        self._count_passed()
        key = phase, step.variant.name, step.kind
        self._numbers[phase] += 1
        self._steps[key] += 1
        is_warm = self._is_warm(phase, step.variant.name, compiling=step.compiling)
        record = self._records[StepKey(*key[:2], "compiling" if step.compiling else step.kind, stage)]
        record.steps += 1
        if not step.compiling and (self._last is None or record is not self._last[1]):
            if self._last is not None:
                self._last[1].untimed_left = self.untimed_left
            self._last, self.untimed_left = (key, record), record.untimed_left
        if step.span is None and not step.compiling:
            return
        span, workload = step.span or Span(start=step.began), step.workload
        span.stop(phase=phase, candidate=step.variant.name, workload=None if step.compiling else workload)
        # For new shapes, libraries select kernels, which may take longer than the step (as for attention on a GPU).
        is_new = not step.compiling and workload is not None and self._is_new(key, workload)
        # A step that ran eagerly although its variant compiles is a sample of neither, and nor is a mixed step.
        is_of_kind = not step.mixed and (step.kind != "eager" or step.variant.config is None)
        step.is_sample = is_warm and workload is not None and not is_new and is_of_kind
        step.span = span if is_warm and workload is not None and not step.mixed else None
        timed = _Timed(self._numbers[phase], workload if step.is_sample else None, span)
        if step.compiling:
            record.add(timed)
        else:
            record.untimed_left = self.untimed_left
            record.add(timed)
            self.untimed_left = record.untimed_left
        self._unread.append((record, timed))
        if len(self._unread) > _MAX_UNREAD:
            self._read(wait=False)

    def _is_warm(self, phase: Phase, variant: str | None, *, compiling: bool) -> bool:
        """Count a step of a variant, and return whether it is no longer a warm-up step."""
        if variant != self._last_variant.get(phase, variant):  # another variant ran before
            self._since_compile[phase, variant] = min(self._since_compile[phase, variant], WARMUP_STEPS - 1)
        self._last_variant[phase] = variant
        if compiling:
            self._since_compile[phase, variant] = 0
            return False
        self._since_compile[phase, variant] += 1
        return self._since_compile[phase, variant] > WARMUP_STEPS

    def _is_new(self, key: tuple[Phase, str | None, StepKind], workload: Workload) -> bool:
        """Return whether no earlier step of the same kind had these shapes."""
        seen, shapes = self._seen_shapes[key], hash(workload.shapes)
        if not workload.shapes or shapes in seen:
            return False
        if len(seen) < _MAX_SHAPES:
            seen.add(shapes)
        return True

    # ------------------------------------------------------------------------------------------ results

    def synchronize(self) -> None:
        """Wait for the GPU, and read all steps so far. Without it, the figures omit steps that the GPU still runs."""
        self._read(wait=True)

    def next_step(self, phase: Phase) -> int:
        """Return the number of the next step in the phase, from 1."""
        passed = self.passed if self._last is not None and self._last[0][0] == phase else 0
        return self._numbers[phase] + passed + 1

    def steps(self, phase: Phase, variant: str | None = None) -> Counter[StepKind]:
        """Return the number of steps of a variant by kind, including steps without a sample."""
        self._count_passed()
        return Counter({key[2]: count for key, count in self._steps.items() if key[:2] == (phase, variant)})

    def windows(
        self, phase: Phase, variant: str | None = None, kind: StepKind = "compiled"
    ) -> dict[Workload, tuple[tuple[float, ...], ...]]:
        """Return the samples in milliseconds by workload, in windows, the latest workload last."""
        self._read(wait=False)
        by_workload: dict[Workload, list[tuple[float, ...]]] = {}
        for key, record in self._records.items():
            for window in record.windows if key[:3] == (phase, variant, kind) else ():
                of_window: defaultdict[Workload, list[float]] = defaultdict(list)
                for timed in window:
                    if timed.workload is not None and timed.ms is not None:
                        of_window[timed.workload].append(timed.ms)
                for workload, ms in of_window.items():  # the latest workload is the last
                    by_workload[workload] = [*by_workload.pop(workload, ()), tuple(ms)]
        return {workload: tuple(windows) for workload, windows in by_workload.items()}

    def times(self, phase: Phase, variant: str | None = None) -> StepTimes:
        """Return the eager and compiled step times of the workload that has the most compiled samples.

        If several workloads have the same number, the latest is returned.
        """
        eager, compiled = self.baseline(phase), self.windows(phase, variant)
        counts = {workload: sum(map(len, windows)) for workload, windows in compiled.items()}
        counts = counts or {workload: len(ms) for workload, ms in eager.items()}
        if not counts:
            return StepTimes()
        workload = max(reversed(counts), key=counts.__getitem__)
        return StepTimes(eager.get(workload, ()), compiled.get(workload, ()), workload=workload)

    def totals(self, phase: Phase) -> Iterator[tuple[StepKey, int, float]]:
        """Yield the number of steps of each kind and stage, and the milliseconds of those that were timed."""
        self._count_passed()
        self._read(wait=False)
        for key, record in self._records.items():
            if key.phase == phase:
                yield key, record.steps, record.ms

    def series(self, phase: Phase) -> tuple[dict[str, Any], ...]:
        """Return the step times of a phase, as one mapping for each kind of step and candidate.

        A mapping contains ``kind`` (a `StepKind`, or ``"compiling"`` if torch compiled during the steps), ``candidate``
        (if the phase has a `Tune`), ``steps`` (numbers of steps in the phase, from 1) and ``ms``. In a long run, the
        lists contain windows of steps that are spread evenly over the run.
        """
        self._read(wait=False)
        points: dict[tuple[str, str | None], list[tuple[int, float]]] = {}
        for key, record in self._records.items():
            if key.phase == phase:
                of_kind = points.setdefault((key.kind, None if key.variant == EAGER else key.variant), [])
                of_kind += [(timed.number, float(f"{timed.ms:.4g}")) for timed in record.timed if timed.ms is not None]
        return tuple(
            {"kind": kind, "candidate": candidate, "steps": [n for n, _ in ordered], "ms": [ms for _, ms in ordered]}
            for (kind, candidate), unsorted in points.items()
            if (ordered := sorted(unsorted))
        )

    def baseline(self, phase: Phase) -> dict[Workload, tuple[float, ...]]:
        """Return the eager samples of a phase by workload."""
        windows = self.windows(phase, EAGER, "eager")
        return {workload: tuple(itertools.chain(*of_workload)) for workload, of_workload in windows.items()}

    def _count_passed(self) -> None:
        """Count the steps of `passed`, which are of the same kind as the last step."""
        if self.passed and self._last is not None:
            key, record = self._last
            self._numbers[key[0]] += self.passed
            self._steps[key] += self.passed
            self._since_compile[key[:2]] += self.passed
            record.steps += self.passed
            self.passed = 0

    def _read(self, *, wait: bool) -> None:
        while self._unread and (wait or self._unread[0][1].span.passed()):
            record, timed = self._unread.popleft()
            timed.ms = timed.span.milliseconds()
            record.ms += timed.ms
