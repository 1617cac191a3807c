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

from compile_callbacks.measuring.by_size import BySize, pairs
from compile_callbacks.measuring.series import StepSeries
from compile_callbacks.measuring.work import Work
from compile_callbacks.phases import Phase

WARMUP_STEPS = 2
"""Steps left out after the way of running changes or anything compiles: allocators, cuDNN and CUDA graphs settle
in them (a CUDA graph is warmed up in its first call and recorded in its second)."""

KEPT_SAMPLES = 1000
"""Samples kept of each kind of work, the latest ones: a month of training must not fill the memory."""

_KEPT_WORKS = 500  # the kinds of work of which samples are kept, the latest ones: nor must shapes that never return

_KEPT_SHAPES = 100_000  # that were seen, as hashes

LATEST_SAMPLES = 20
"""Samples of whatever work that are kept in their order."""

_SHARED_SAMPLES = 5  # of equal work on both sides, with which nothing has to be compared by its size

STEADY_STEPS = 100
"""Steps on a GPU that ran in the same way with nothing compiled: of those after them one in `TIMED_OF_STEADY` is timed,
as two CUDA events take the host 50 µs to 250 µs, which small steps wait for."""

TIMED_OF_STEADY = 8

_UNREAD_SPANS = 64  # so many CUDA events are left unread before those that the GPU has passed are read


@dataclass(frozen=True)
class StepTimes:
    """Step times of equal work, eager against compiled.

    Attributes:
        eager_ms: Eager samples, in milliseconds.
        compiled_ms: Compiled samples, in milliseconds.
        restored: Whether the eager samples are those of an earlier run.
        work: The work; ``None`` where there are no samples.
        by_size: Whether hardly two batches have the same shapes, and the samples are given as for the usual one.
    """

    eager_ms: tuple[float, ...] = ()
    compiled_ms: tuple[float, ...] = ()
    restored: bool = False
    work: Work | None = None
    by_size: bool = False


StepKind = Literal["eager", "compiled", "compiling"]
"""How a step ran; ``"compiling"``: something was compiled in it, for these or other settings."""

_Way = tuple[Phase, bool, str | None]  # a phase, whether it is compiled, and with which of several settings


class _Span:
    """The time between two points of a step; on a GPU known once the GPU has passed both."""

    def __init__(self, cuda: bool, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cuda = cuda
        self._start = self._mark()
        self._end: float | torch.cuda.Event | None = None

    def stop(self) -> None:
        self._end = self._mark()

    def passed(self) -> bool:
        return not isinstance(self._end, torch.cuda.Event) or self._end.query()

    def milliseconds(self) -> float:
        """The time; waits for the GPU to have passed the end."""
        if isinstance(self._start, torch.cuda.Event):
            assert isinstance(self._end, torch.cuda.Event)
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end))
        assert isinstance(self._end, float)
        return (self._end - self._start) * 1000

    def _mark(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Samples:
    """Samples of one kind of work: those read, and the spans that are not yet."""

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

    On a GPU a step is timed by CUDA events, which are read when the GPU has passed them or somebody asks: steady
    training is not synchronised. Where it has been steady for `STEADY_STEPS`, not every step is timed. A step is no
    sample while anything compiles in it, nor are the `WARMUP_STEPS` after that or after a change between eager and
    compiled. Samples are compared only with samples of equal work.

    Args:
        clock: Seconds, rising; for steps on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps: Counter[_Way] = Counter()
        self._steps_of: Counter[Phase] = Counter()
        self._samples: dict[_Way, dict[Work, _Samples]] = defaultdict(dict)
        self._latest: dict[_Way, deque[tuple[Work, _Span]]] = defaultdict(lambda: deque(maxlen=LATEST_SAMPLES))
        self._seen_shapes: dict[_Way, set[int]] = defaultdict(set)
        self._steps_judged: Counter[_Way] = Counter()
        self._saved_seconds: dict[Phase, float] = {}
        self._settled: Counter[_Way] = Counter()
        self._restored: dict[Phase, dict[Work, tuple[float, ...]]] = {}
        self._series: dict[Phase, dict[tuple[StepKind, str | None], StepSeries]] = defaultdict(dict)
        self._running: _Span | None = None
        self._timed = True
        self._steady: tuple[_Way | None, int] = None, 0  # the way of the last steps, and how many there were of it
        self._chance = random.Random(0)  # not every eighth: every second or fourth step may be one of its own kind

    def start(self, *, cuda: bool, wanted: bool = True) -> None:
        """A step begins.

        Args:
            cuda: Whether it runs on a GPU.
            wanted: Whether it is to be timed in any case.
        """
        _, steady_steps = self._steady
        unsteady = steady_steps < STEADY_STEPS
        self._timed = wanted or not cuda or unsteady or self._chance.randrange(TIMED_OF_STEADY) == 0
        # The host's clock costs nothing, and is good enough for a step that turns out to compile.
        self._running = _Span(cuda and self._timed, self._clock)

    def takes_turn(self, phase: Phase, *, compiled: bool, settings: str | None = None) -> None:
        """The next step runs otherwise than the one before it: where that had settled before, it is no sample."""
        way = phase, compiled, settings
        self._settled[way] = min(self._settled[way], WARMUP_STEPS - 1)

    def stop(self, phase: Phase, *, compiled: bool, work: Work, disturbed: bool, settings: str | None = None) -> bool:
        """A step ends.

        Args:
            phase: The phase it belongs to.
            compiled: Whether it ran with the compiled targets.
            work: What was to be done.
            disturbed: Whether anything compiled meanwhile.
            settings: The settings that it was compiled with, where the phase has had several.

        Returns:
            Whether the step is a sample, which one that was not timed is not.
        """
        span, self._running = self._running, None
        if span is None:
            return False
        span.stop()
        key = phase, compiled, settings
        work = self._as_seen(key, work)
        self._steps[key] += 1
        self._steps_of[phase] += 1
        last, steady_steps = self._steady
        self._steady = key, 0 if disturbed or key != last else steady_steps + 1
        if not (self._timed or disturbed):
            return False
        self._keep_order(phase, "compiling" if disturbed else "compiled" if compiled else "eager", settings, span)
        if disturbed:
            self._settled[key] = 0
            return False
        self._settled[key] += 1
        if self._settled[key] <= WARMUP_STEPS:
            return False
        of_way = self._samples[key]
        of_work = of_way[work] if work in of_way else _Samples()
        of_way.pop(work, None)
        of_way[work] = of_work  # the latest is the last
        of_work.add(span)
        if len(of_way) > _KEPT_WORKS:
            del of_way[next(iter(of_way))]
        self._latest[key].append((work, span))
        return True

    def forget(self, phase: Phase) -> None:
        """Drop the samples of a phase; how many steps there were, what they saved, and their series are kept."""
        for way in [way for way in self._samples if way[0] == phase and way[1]]:
            times = self.times(phase, way[2])
            eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
            if eager_ms is not None and compiled_ms is not None:
                saved_seconds = (eager_ms - compiled_ms) * self.steps_to_judge(phase, way[2]) / 1000
                self._saved_seconds[phase] = self._saved_seconds.get(phase, 0.0) + saved_seconds
                self._steps_judged[way] = self._steps[way]
        for of_ways in (self._samples, self._latest):
            for way in [way for way in of_ways if way[0] == phase]:
                del of_ways[way]
        self._restored.pop(phase, None)
        for way in self._settled:
            if way[0] == phase:
                self._settled[way] = 0

    def abandon(self) -> None:
        """Forget the step that is running."""
        self._running = None

    def compiled_steps(self, phase: Phase, settings: str | None = None) -> int:
        """All compiled steps of a phase, samples or not."""
        return self._steps[phase, True, settings]

    def steps_to_judge(self, phase: Phase, settings: str | None = None) -> int:
        """Compiled steps since samples were last forgotten, which `times` tells of."""
        way = phase, True, settings
        return self._steps[way] - self._steps_judged[way]

    def saved_before_seconds(self, phase: Phase) -> float | None:
        """What compiled steps saved before samples were last forgotten; ``None`` where none were."""
        return self._saved_seconds.get(phase)

    def series(self, phase: Phase) -> tuple[dict[str, Any], ...]:
        """The steps of a phase in order, a mapping for each way in which they ran; waits for the GPU.

        Each has ``kind`` (see `StepKind`), ``settings`` (the candidate, where the phase has had several), ``steps``
        (their numbers in the phase, from 1) and ``ms``; of many timed steps an even choice, see `StepSeries`.
        """
        found = []
        for (kind, settings), series in self._series[phase].items():
            steps, milliseconds = zip(*series.read(), strict=True)
            found.append({"kind": kind, "settings": settings, "steps": list(steps), "ms": list(milliseconds)})
        return tuple(found)

    def times(self, phase: Phase, settings: str | None = None) -> StepTimes:
        """The samples of a phase, of the work that most eager and compiled steps share.

        Where few share any, because shapes vary, samples as for the usual batch, see `BySize`. Where none is shared,
        the eager samples of an earlier run stand in; where those share none either, the samples of the work that most
        steps did, with one of the two sides empty.
        """
        eager, compiled = self.samples(phase, compiled=False), self.samples(phase, compiled=True, settings=settings)
        earlier = self._restored.get(phase, {})
        for baseline, restored in ((eager, False), (earlier, True)):
            work = _most_shared(baseline, compiled)
            if work is None or min(len(baseline[work]), len(compiled[work])) < _SHARED_SAMPLES:
                by_size = BySize.of(baseline, [work for work, _ in pairs(compiled)])
                if by_size is not None and (scaled := by_size.scaled_ms(pairs(compiled))):
                    return StepTimes(by_size.eager_ms(), scaled, restored=restored, work=by_size.work, by_size=True)
            if work is not None:
                return StepTimes(baseline[work], compiled[work], restored=restored, work=work)
        if compiled:
            work = _longest(compiled)
            return StepTimes((), compiled[work], work=work)
        if eager:
            work = _longest(eager)
            return StepTimes(eager[work], (), work=work)
        work = _longest(earlier) if earlier else None
        return StepTimes(earlier[work], (), restored=True, work=work) if work is not None else StepTimes()

    def _as_seen(self, way: _Way, work: Work) -> Work:
        """The work with whether its shapes are new."""
        seen, shapes = self._seen_shapes[way], hash(work.shapes)
        if not work.shapes or shapes in seen:
            return work
        if len(seen) < _KEPT_SHAPES:
            seen.add(shapes)
        return work._replace(new=True)

    def _keep_order(self, phase: Phase, kind: StepKind, settings: str | None, span: _Span) -> None:
        series = self._series[phase]
        if (kind, settings) not in series:
            series[kind, settings] = StepSeries()
        series[kind, settings].add(self._steps_of[phase], span)

    def baseline(self, phase: Phase) -> dict[Work, tuple[float, ...]]:
        """The eager samples of a phase by their work, those of an earlier run among them."""
        return {**self._restored.get(phase, {}), **self.samples(phase, compiled=False)}

    def restore(self, phase: Phase, baseline: Mapping[Work, Sequence[float]]) -> None:
        """Take the eager samples of an earlier run, as `baseline` gave them."""
        self._restored[phase] = {work: tuple(samples) for work, samples in baseline.items() if samples}

    def samples(self, phase: Phase, *, compiled: bool, settings: str | None = None) -> dict[Work, tuple[float, ...]]:
        """The samples in milliseconds by their work, the latest last; waits for the GPU."""
        return {work: samples.read() for work, samples in self._samples[phase, compiled, settings].items()}

    def latest(self, phase: Phase, settings: str | None = None) -> list[tuple[Work, float]]:
        """The latest samples of compiled steps, at most `LATEST_SAMPLES`, with their work; waits for the GPU."""
        return [(work, span.milliseconds()) for work, span in self._latest[phase, True, settings]]


def call_times_ms(
    call: Callable[[], object], *, cuda: bool, samples: int = 50, seconds: float = 10
) -> tuple[float, ...]:
    """Time calls one by one, each waited for; the first `WARMUP_STEPS` are left out.

    Args:
        call: What is timed.
        cuda: Whether it computes on the GPU.
        samples: How many calls to time.
        seconds: When to stop before that; one call is timed in any case.

    Returns:
        Milliseconds of each call.
    """
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    for done in range(WARMUP_STEPS + samples):
        if cuda:
            torch.compiler.cudagraph_mark_step_begin()
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
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


def _most_shared(a: Mapping[Work, tuple[float, ...]], b: dict[Work, tuple[float, ...]]) -> Work | None:
    """The work that most samples of both are of; of several the one that was done last."""
    shared = [work for work in reversed(b) if work in a]
    return max(shared, key=lambda work: min(len(a[work]), len(b[work])), default=None)


def _longest(samples: Mapping[Work, tuple[float, ...]]) -> Work:
    return max(samples, key=lambda work: len(samples[work]))
