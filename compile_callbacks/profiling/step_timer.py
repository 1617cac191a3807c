"""How long steps take: clocks for CPU and GPU, and which steps are samples."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compile_callbacks._utils.phases import Phase
from compile_callbacks.profiling.step_series import Span, StepSeries
from compile_callbacks.profiling.workload import Workload

WARMUP_STEPS = 2
"""Steps left out after the way of running changes or anything compiles: allocators, cuDNN and CUDA graphs settle
in them (a CUDA graph is warmed up in its first call and recorded in its second)."""

KEPT_SAMPLES = 1000
"""Samples kept of each workload, the latest ones: a month of training must not fill the memory."""

_KEPT_WORKLOADS = 500  # the workloads of which samples are kept, the latest ones: nor must shapes that never return

_KEPT_SHAPES = 100_000  # that were seen, as hashes

RECENT_SAMPLES = 20
"""The latest compiled samples, in which a slowdown shows."""

STEADY_STEPS = 100
"""Steps that ran in the same way with nothing compiled: of those after them one in `TIMED_OF_STEADY` is timed. Two CUDA
events take 50 µs to 250 µs of the CPU's time, and a look at the batch takes 10 µs, which small steps wait for."""

TIMED_OF_STEADY = 8

_UNREAD_SPANS = 64  # so many CUDA events are left unread before those that the GPU has passed are read


@dataclass(frozen=True)
class StepTimes:
    """Step times of equal workload, eager against compiled.

    Attributes:
        eager_ms: Eager samples, in milliseconds.
        compiled_ms: Compiled samples, in milliseconds.
        restored: Whether the eager samples are those of an earlier run.
        workload: The workload; ``None`` where there are no samples.
    """

    eager_ms: tuple[float, ...] = ()
    compiled_ms: tuple[float, ...] = ()
    restored: bool = False
    workload: Workload | None = None


StepKind = Literal["eager", "compiled", "compiling"]
"""How a step ran; ``"compiling"``: something was compiled in it, for this candidate or another."""

_Way = tuple[Phase, bool, str | None]  # a phase, whether it is compiled, and the candidate of a tuned phase


class _Span:
    """The time between two points of a step; on a GPU known when the GPU has passed both.

    Args:
        device: The GPU, of CUDA, ROCm, XPU or MPS for example; ``None`` to measure with the clock.
        clock: Seconds, rising.
        start: The time on the clock at which the span began, if it began before.
    """

    def __init__(self, device: torch.device | None, clock: Callable[[], float], start: float | None = None) -> None:
        self._clock = clock
        # The module of each accelerator with streams has them: torch.cuda.Event, torch.xpu.Event, torch.mps.Event.
        self._event = None if device is None else getattr(getattr(torch, device.type, None), "Event", None)
        self._start: Any = self._mark() if start is None else start
        self._end: Any = None

    def stop(self) -> None:
        self._end = self._mark()

    def passed(self) -> bool:
        return self._event is None or bool(self._end.query())

    def milliseconds(self) -> float:
        """The time; waits for the GPU to have passed the end."""
        if self._event is None:
            return float((self._end - self._start) * 1000)
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end))

    def _mark(self) -> Any:
        if self._event is None:
            return self._clock()
        event = self._event(enable_timing=True)
        event.record()
        return event


class _Samples:
    """Samples of one kind of workload: those read, and the spans that are not yet."""

    def __init__(self) -> None:
        self._milliseconds: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._unread: deque[_Span] = deque()

    def add(self, span: _Span) -> None:
        self._unread.append(span)
        while len(self._unread) > _UNREAD_SPANS and self._unread[0].passed():
            self._milliseconds.append(self._unread.popleft().milliseconds())

    def read(self) -> tuple[float, ...]:
        while self._unread:
            self._milliseconds.append(self._unread.popleft().milliseconds())
        return tuple(self._milliseconds)


class StepTimer:
    """Times steps and keeps those that are samples.

    On a GPU a step is timed by events, which are read when the GPU has passed them or somebody asks: steady training is
    not synchronized. After `STEADY_STEPS` steady steps, not every step is timed. A step is no
    sample while anything compiles in it, nor are the `WARMUP_STEPS` after that or after a change between eager and
    compiled, nor the first step with new shapes. Samples are compared only with samples of equal workload.

    Args:
        clock: Seconds, rising; for steps on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.last_step: Span | None = None
        """The time of the last step; ``None`` if something compiled in it, or if it was a warm-up step."""
        self._clock = clock
        self._steps: Counter[_Way] = Counter()
        self._samples: dict[_Way, dict[Workload, _Samples]] = defaultdict(dict)
        self._seen_shapes: dict[_Way, set[int]] = defaultdict(set)
        self._settled: Counter[_Way] = Counter()
        self._restored: dict[Phase, dict[Workload, tuple[float, ...]]] = {}
        self._series: dict[Phase, dict[tuple[StepKind, str | None], StepSeries]] = defaultdict(dict)
        self._running = False
        self._span: _Span | None = None  # of the running step, if it is timed
        self._started = 0.0  # when the running step began, if it is not timed
        self._last_way: _Way | None = None
        self._steady_steps = 0  # that ran in the last way
        self._chance = random.Random(0)  # not every eighth: every second or fourth step may be one of its own kind

    def start(self, device: torch.device | None = None, *, wanted: bool = True) -> bool:
        """A step begins.

        Args:
            device: The device that it runs on; ``None`` or a CPU to measure with the clock.
            wanted: Whether it is to be timed in any case.

        Returns:
            Whether it is timed.
        """
        self._running = True
        if not wanted and self._steady_steps >= STEADY_STEPS and self._chance.random() * TIMED_OF_STEADY >= 1:
            self._span, self._started = None, self._clock()  # good enough for a step that turns out to compile
            return False
        on_gpu = device is not None and device.type != "cpu"
        self._span = _Span(device if on_gpu else None, self._clock)
        return True

    def restart_warmup(self, phase: Phase, *, compiled: bool, candidate: str | None = None) -> None:
        """The next step runs otherwise than the one before it: where that had settled before, it is no sample."""
        way = phase, compiled, candidate
        self._settled[way] = min(self._settled[way], WARMUP_STEPS - 1)

    def stop(
        self, phase: Phase, *, compiled: bool, workload: Workload | None, disturbed: bool, candidate: str | None = None
    ) -> bool:
        """A step ends.

        Args:
            phase: The phase it belongs to.
            compiled: Whether it ran with the compiled targets.
            workload: What was to be done; ``None`` if the step was not timed.
            disturbed: Whether anything compiled meanwhile.
            candidate: The candidate that it ran with, if the phase is tuned.

        Returns:
            Whether the step is a sample, which one that was not timed is not.
        """
        self.last_step = None
        if not self._running:
            return False
        self._running = False
        key = phase, compiled, candidate
        self._steps[key] += 1
        self._steady_steps = 0 if disturbed or key != self._last_way else self._steady_steps + 1
        self._last_way = key
        if self._span is None and not disturbed:
            return False
        span = self._span or _Span(None, self._clock, self._started)
        span.stop()
        self._keep_order(phase, "compiling" if disturbed else "compiled" if compiled else "eager", candidate, span)
        if disturbed:
            self._settled[key] = 0
            return False
        self._settled[key] += 1
        if workload is None:
            return False
        new_shapes = self._is_new(key, workload)
        if self._settled[key] <= WARMUP_STEPS:
            return False
        self.last_step = span
        # Libraries choose kernels for new shapes, which may take longer than the step (attention on a GPU does).
        if new_shapes:
            return False
        of_way = self._samples[key]
        of_workload = of_way[workload] if workload in of_way else _Samples()
        of_way.pop(workload, None)
        of_way[workload] = of_workload  # the latest is the last
        of_workload.add(span)
        if len(of_way) > _KEPT_WORKLOADS:
            del of_way[next(iter(of_way))]
        return True

    def discard_step(self) -> None:
        """Discard the running step."""
        self._running = False

    def compiled_steps(self, phase: Phase, candidate: str | None = None) -> int:
        """All compiled steps of a phase, samples or not."""
        return self._steps[phase, True, candidate]

    def series(self, phase: Phase) -> tuple[dict[str, Any], ...]:
        """The steps of a phase in order, a mapping for each way in which they ran; waits for the GPU.

        Each has ``kind`` (see `StepKind`), ``candidate`` (where the phase has had several), ``steps``
        (their numbers in the phase, from 1) and ``ms``; of many timed steps an even choice, see `StepSeries`.
        """
        found = []
        for (kind, candidate), series in self._series[phase].items():
            steps, milliseconds = zip(*series.read(), strict=True)
            found.append({"kind": kind, "candidate": candidate, "steps": list(steps), "ms": list(milliseconds)})
        return tuple(found)

    def times(self, phase: Phase, candidate: str | None = None) -> StepTimes:
        """The samples of a phase for its current workload: what most compiled steps did, of several the latest.

        Eager samples of another workload are not compared. If no eager step of this run had the current workload, the
        samples of an earlier run are used, or the eager side stays empty.
        """
        eager, compiled = self.samples(phase, compiled=False), self.samples(phase, compiled=True, candidate=candidate)
        earlier = self._restored.get(phase, {})
        if workload := _most_frequent(compiled):
            restored = workload not in eager and workload in earlier
            return StepTimes(
                (earlier if restored else eager).get(workload, ()),
                compiled[workload],
                restored=restored,
                workload=workload,
            )
        if workload := _most_frequent(eager):
            return StepTimes(eager[workload], (), workload=workload)
        if workload := _most_frequent(earlier):
            return StepTimes(earlier[workload], (), restored=True, workload=workload)
        return StepTimes()

    def _is_new(self, way: _Way, workload: Workload) -> bool:
        """Whether no step before it that ran in the same way had these shapes."""
        seen, shapes = self._seen_shapes[way], hash(workload.shapes)
        if not workload.shapes or shapes in seen:
            return False
        if len(seen) < _KEPT_SHAPES:
            seen.add(shapes)
        return True

    def _keep_order(self, phase: Phase, kind: StepKind, candidate: str | None, span: _Span) -> None:
        series = self._series[phase]
        if (kind, candidate) not in series:
            series[kind, candidate] = StepSeries()
        series[kind, candidate].add(sum(n for way, n in self._steps.items() if way[0] == phase), span)

    def baseline(self, phase: Phase) -> dict[Workload, tuple[float, ...]]:
        """The eager samples of a phase by workload, those of an earlier run among them."""
        return {**self._restored.get(phase, {}), **self.samples(phase, compiled=False)}

    def restore(self, phase: Phase, baseline: Mapping[Workload, Sequence[float]]) -> None:
        """Take the eager samples of an earlier run, as `baseline` gave them."""
        self._restored[phase] = {workload: tuple(samples) for workload, samples in baseline.items() if samples}

    def samples(
        self, phase: Phase, *, compiled: bool, candidate: str | None = None
    ) -> dict[Workload, tuple[float, ...]]:
        """The samples in milliseconds by workload, the latest last; waits for the GPU."""
        return {workload: samples.read() for workload, samples in self._samples[phase, compiled, candidate].items()}


def call_times_ms(
    call: Callable[[], object], *, device: torch.device, samples: int = 50, seconds: float = 10
) -> tuple[float, ...]:
    """Time calls one by one, with a synchronization after each; the first `WARMUP_STEPS` are left out.

    Args:
        call: What is timed.
        device: The device that it computes on.
        samples: How many calls to time.
        seconds: When to stop before that; one call is timed in any case.

    Returns:
        Milliseconds of each call.
    """
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", lambda: None)
    for done in range(WARMUP_STEPS + samples):
        if device.type == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        end = time.perf_counter()
        if done >= WARMUP_STEPS:
            found.append((end - start) * 1000)
        if found and end > deadline:
            break
    return tuple(found)


def median_ms(samples: tuple[float, ...]) -> float | None:
    """The median, or ``None`` of nothing."""
    return statistics.median(samples) if samples else None


def spread_ms(samples: tuple[float, ...]) -> float | None:
    """The interquartile range: half of the samples lie within so many milliseconds; ``None`` of fewer than four."""
    if len(samples) < 4:
        return None
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return third - first


def _most_frequent(samples: Mapping[Workload, tuple[float, ...]]) -> Workload | None:
    """The workload with the most samples; of several, the latest."""
    return max(reversed(list(samples)), key=lambda workload: len(samples[workload]), default=None)
