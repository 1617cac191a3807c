"""`StepTimer`: times the steps of a run for `Session`, and decides which step times are samples.

A *sample* is the time of a step that may be compared with other samples.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import EAGER
from compile_callbacks.profiling.saved_time import SavedTime, Savings, StepSeries
from compile_callbacks.profiling.spans import Span
from compile_callbacks.profiling.step_stats import MIN_SAMPLES
from compile_callbacks.profiling.steps import Step, StepKind
from compile_callbacks.profiling.workload import Workload

WARMUP_STEPS = 2
"""The number of steps without a sample after a compile, and after a change between eager and compiled. In these steps,
allocators and cuDNN warm up. torch warms up a CUDA graph in its first call, and records it in the second call."""

MAX_SAMPLES = 1000
"""The number of the latest samples that the timer keeps of each workload, which limits the memory of a long run."""

_MAX_WORKLOADS = 500  # the maximum number of workloads with samples; the latest are kept
_MAX_SHAPES = 100_000  # the maximum number of hashes of shapes that have occurred

STEADY_STEPS = 100
"""The number of steps of one kind without a compile after which on average one step in `TIMED_ONE_OF` is timed. Two
CUDA events take 50 µs to 250 µs of CPU time, and reading the batch takes 10 µs, which delays a CPU-bound step."""

TIMED_ONE_OF = 32

_MAX_UNREAD = 64  # the number of unread CUDA events after which the timer reads the events that the GPU has passed

_Key = tuple[Phase, str | None, StepKind]  # the phase, the name of the variant, and the kind of step


@dataclass(frozen=True)
class StepTimes:
    """Step times of equal workload, eager and compiled.

    Attributes:
        eager_ms: Eager samples, in milliseconds.
        compiled_ms: Compiled samples, in milliseconds.
        restored: Whether the eager samples are from an earlier run.
        workload: The workload, or ``None`` if there are no samples.
        kind: Whether ``compiled_ms`` are times of compiled or of partly compiled steps.
    """

    eager_ms: tuple[float, ...] = ()
    compiled_ms: tuple[float, ...] = ()
    restored: bool = False
    workload: Workload | None = None
    kind: StepKind = "compiled"


class _Step(NamedTuple):
    """A timed step whose span the timer has not read yet."""

    span: Span
    number: int
    key: _Key
    compiling: bool
    stage: str
    sample_of: Workload | None


class StepTimer:
    """Times steps and keeps the samples.

    On a GPU, the timer uses CUDA events, and reads them after the GPU has passed them, so that it does not synchronize
    training. The time of a step is not a sample if torch compiles during the step, or if the step is the first with new
    shapes. The `WARMUP_STEPS` steps after a compile, and after a change between eager and compiled, give no sample
    either. Samples are only compared with samples of equal workload.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.untimed_left = 0
        """The number of the next steps that need no timing. The caller subtracts 1 for each of them."""
        self.passed = 0
        """The number of steps like the last step since the last call of `stop`, which are not counted yet."""
        self.clock = clock
        self._numbers: Counter[Phase] = Counter()
        self._steps: Counter[_Key] = Counter()
        self._samples: dict[_Key, dict[Workload, deque[float]]] = defaultdict(dict)
        self._seen_shapes: dict[_Key, set[int]] = defaultdict(set)
        self._since_compile: Counter[tuple[Phase, str | None]] = Counter()  # steps of each variant
        self._last_variant: dict[Phase, str | None] = {}
        self._restored: dict[Phase, dict[Workload, tuple[float, ...]]] = {}
        self._series: dict[Phase, dict[tuple[str, str | None], StepSeries]] = defaultdict(dict)
        self._saved: dict[Phase, SavedTime] = defaultdict(SavedTime)
        self._unread: deque[_Step] = deque()
        self._last_key: _Key | None = None
        self._steady_steps = 0
        self._untimed: dict[Phase, Counter[tuple[_Key, str]]] = defaultdict(Counter)  # steps of each kind and stage
        self._stages: dict[_Key, str] = {}  # the stage of the last timed step
        self._random = random.Random(0)  # because every second or fourth step may differ from the others

    # ------------------------------------------------------------------------------------------ a step

    def stop(self, phase: Phase, step: Step) -> None:
        """End a step, and set whether its time is a sample. Delete the time if torch compiled or warmed up."""
        if self.passed:
            self._count_passed()
        key = phase, step.variant.name, step.kind
        self._numbers[phase] += 1
        self._steps[key] += 1
        self._steady_steps = 0 if step.compiling or key != self._last_key else self._steady_steps + 1
        self._last_key = key
        is_warm = self._is_warm(phase, step.variant.name, compiling=step.compiling)
        if self._steady_steps < STEADY_STEPS:
            self.untimed_left = 0
        if step.span is None and not step.compiling:
            self._untimed[phase][key, self._stages.get(key, "")] += 1
            return
        if self._steady_steps >= STEADY_STEPS:  # the gaps are random, so that each step is equally likely to be timed
            self.untimed_left = int(math.log(1 - self._random.random()) / math.log(1 - 1 / TIMED_ONE_OF))
        span, workload = step.span or Span(None, self.clock, step.began), step.workload
        span.stop()
        # For new shapes, libraries select kernels, which may take longer than the step (as for attention on a GPU).
        is_new = not step.compiling and workload is not None and self._is_new(key, workload)
        # A step that ran eagerly although its variant compiles is a sample of neither.
        is_eager_sample = step.kind != "eager" or step.variant.name == EAGER
        step.is_sample = is_warm and workload is not None and not is_new and is_eager_sample
        step.span = span if is_warm and workload is not None else None
        if workload is not None:
            self._stages[key] = workload.stage
        sample_of = workload if step.is_sample else None
        self._unread.append(
            _Step(span, self._numbers[phase], key, step.compiling, self._stages.get(key, ""), sample_of)
        )
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

    def _is_new(self, key: _Key, workload: Workload) -> bool:
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
        passed = self.passed if self._last_key is not None and self._last_key[0] == phase else 0
        return self._numbers[phase] + passed + 1

    def steps(self, phase: Phase, variant: str | None = None) -> Counter[StepKind]:
        """Return the number of steps of a variant by kind, including steps without a sample."""
        self._count_passed()
        return Counter({key[2]: count for key, count in self._steps.items() if key[:2] == (phase, variant)})

    def samples(
        self, phase: Phase, variant: str | None = None, kind: StepKind = "compiled"
    ) -> dict[Workload, tuple[float, ...]]:
        """Return the samples in milliseconds by workload, the latest workload last."""
        self._read(wait=False)
        return {workload: tuple(ms) for workload, ms in self._samples[phase, variant, kind].items()}

    def times(self, phase: Phase, variant: str | None = None) -> StepTimes:
        """Return the eager and compiled step times of the workload that has the most compiled samples.

        If most steps were partly compiled, the times are those of partly compiled steps. If several workloads have the
        same number, the latest is returned. If no eager step of this run had this workload, the eager samples are from
        an earlier run, or empty.
        """
        steps = self.steps(phase, variant)
        kind: StepKind = "partly compiled" if steps["partly compiled"] > steps["compiled"] else "compiled"
        eager, compiled = self.samples(phase, EAGER, "eager"), self.samples(phase, variant, kind)
        earlier = self._restored.get(phase, {})
        if workload := _most_frequent(compiled):
            restored = workload not in eager and workload in earlier
            eager_ms = (earlier if restored else eager).get(workload, ())
            return StepTimes(eager_ms, compiled[workload], restored=restored, workload=workload, kind=kind)
        if workload := _most_frequent(eager):
            return StepTimes(eager[workload], (), workload=workload, kind=kind)
        if workload := _most_frequent(earlier):
            return StepTimes(earlier[workload], (), restored=True, workload=workload, kind=kind)
        return StepTimes(kind=kind)

    def savings(self, phase: Phase, other_seconds: float = 0.0) -> Savings | None:
        """Return the time that compiled steps saved, or ``None`` if there are too few eager samples."""
        self._count_passed()
        for ((_, variant, kind), stage), steps in self._untimed.pop(phase, Counter()).items():
            if kind != "eager":
                self._saved[phase].add_untimed(steps, stage=stage, candidate=variant)
        of_stage: defaultdict[str, list[float]] = defaultdict(list)
        for workload, samples in self.baseline(phase).items():
            of_stage[workload.stage] += samples
        eager_ms = {stage: fmean(samples) for stage, samples in of_stage.items() if len(samples) >= MIN_SAMPLES}
        return self._saved[phase].savings(eager_ms, other_seconds)

    def series(self, phase: Phase) -> tuple[dict[str, Any], ...]:
        """Return the step times of a phase, as one mapping for each kind of step and candidate.

        A mapping contains ``kind`` (a `StepKind`, or ``"compiling"`` if torch compiled during the steps), ``candidate``
        (if the phase has a `Tune`), ``steps`` (numbers of steps in the phase, from 1) and ``ms``. In a long run, the
        lists contain randomly chosen timed steps.
        """
        self._read(wait=False)
        found = []
        for (kind, candidate), series in self._series[phase].items():
            steps, milliseconds = series.read()
            found.append({"kind": kind, "candidate": candidate, "steps": steps, "ms": milliseconds})
        return tuple(found)

    def baseline(self, phase: Phase) -> dict[Workload, tuple[float, ...]]:
        """Return the eager samples of a phase by workload, including those of an earlier run."""
        return {**self._restored.get(phase, {}), **self.samples(phase, EAGER, "eager")}

    def restore(self, phase: Phase, baseline: Mapping[Workload, Sequence[float]]) -> None:
        """Add the eager samples that `baseline` returned in an earlier run."""
        self._restored[phase] = {workload: tuple(samples) for workload, samples in baseline.items() if samples}

    def _count_passed(self) -> None:
        """Count the steps of `passed`, which are of the same kind as the last step."""
        if self.passed and self._last_key is not None:
            self._numbers[self._last_key[0]] += self.passed
            self._steps[self._last_key] += self.passed
            self._untimed[self._last_key[0]][self._last_key, self._stages.get(self._last_key, "")] += self.passed
            self._steady_steps += self.passed
            self.passed = 0

    def _read(self, *, wait: bool) -> None:
        while self._unread and (wait or self._unread[0].span.passed()):
            self._keep(self._unread.popleft())

    def _keep(self, step: _Step) -> None:
        phase, variant, kind = step.key
        ms = step.span.milliseconds()
        candidate = None if variant == EAGER else variant
        shown = "compiling" if step.compiling else kind
        series = self._series[phase].setdefault((shown, candidate), StepSeries())
        series.add(step.number, ms)
        if step.compiling or kind != "eager":
            self._saved[phase].add(ms, stage=step.stage, candidate=candidate, compiling=step.compiling)
        if step.sample_of is not None:
            by_workload = self._samples[step.key]
            of_workload = by_workload.pop(step.sample_of, None) or deque(maxlen=MAX_SAMPLES)
            of_workload.append(ms)
            by_workload[step.sample_of] = of_workload  # inserted again, so that the latest workload is the last
            if len(by_workload) > _MAX_WORKLOADS:
                del by_workload[next(iter(by_workload))]


def _most_frequent(samples: Mapping[Workload, tuple[float, ...]]) -> Workload | None:
    """Return the workload with the most samples. If several have the same number, return the latest."""
    return max(reversed(list(samples)), key=lambda workload: len(samples[workload]), default=None)
