"""How long steps take: clocks for CPU and GPU, and which steps are samples."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compile_callbacks.measuring.series import StepSeries
from compile_callbacks.phases import Phase

WARMUP_STEPS = 2
"""Steps left out after the way of running changes or anything compiles: allocators, cuDNN and CUDA graphs settle
in them (a CUDA graph is warmed up in its first call and recorded in its second)."""

KEPT_SAMPLES = 1000
"""Samples kept of each kind of work, the latest ones: a month of training must not fill the memory."""

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
        work: The ``repr`` of the work; ``None`` where there are no samples.
    """

    eager_ms: tuple[float, ...] = ()
    compiled_ms: tuple[float, ...] = ()
    restored: bool = False
    work: str | None = None


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
        self._samples: dict[_Way, dict[Hashable, _Samples]] = defaultdict(dict)
        self._settled: Counter[_Way] = Counter()
        self._restored: dict[Phase, dict[str, tuple[float, ...]]] = {}
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

    def stop(
        self, phase: Phase, *, compiled: bool, work: Hashable, disturbed: bool, settings: str | None = None
    ) -> bool:
        """A step ends.

        Args:
            phase: The phase it belongs to.
            compiled: Whether it ran with the compiled targets.
            work: What was to be done; steps of equal work compare equal, and have the same ``repr``.
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
        if work not in self._samples[key]:
            self._samples[key][work] = _Samples()
        self._samples[key][work].add(span)
        return True

    def abandon(self) -> None:
        """Forget the step that is running."""
        self._running = None

    def compiled_steps(self, phase: Phase, settings: str | None = None) -> int:
        """All compiled steps of a phase, samples or not."""
        return self._steps[phase, True, settings]

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

        Where none is shared, the eager samples of an earlier run stand in; where those share none either, the
        samples of the work that most steps did, with one of the two sides empty.
        """
        eager, compiled = self.samples(phase, compiled=False), self.samples(phase, compiled=True, settings=settings)
        if (work := _most_shared(eager, compiled)) is not None:
            return StepTimes(eager[work], compiled[work], work=work)
        earlier = self._restored.get(phase, {})
        if (work := _most_shared(earlier, compiled)) is not None:
            return StepTimes(earlier[work], compiled[work], restored=True, work=work)
        if compiled:
            work = _longest(compiled)
            return StepTimes((), compiled[work], work=work)
        if eager:
            work = _longest(eager)
            return StepTimes(eager[work], (), work=work)
        work = _longest(earlier) if earlier else None
        return StepTimes(earlier[work], (), restored=True, work=work) if work is not None else StepTimes()

    def _keep_order(self, phase: Phase, kind: StepKind, settings: str | None, span: _Span) -> None:
        series = self._series[phase]
        if (kind, settings) not in series:
            series[kind, settings] = StepSeries()
        series[kind, settings].add(self._steps_of[phase], span)

    def baseline(self, phase: Phase) -> dict[str, tuple[float, ...]]:
        """The eager samples of a phase by the ``repr`` of their work, those of an earlier run among them."""
        return {**self._restored.get(phase, {}), **self.samples(phase, compiled=False)}

    def restore(self, phase: Phase, baseline: Mapping[str, Sequence[float]]) -> None:
        """Take the eager samples of an earlier run, as `baseline` gave them."""
        self._restored[phase] = {work: tuple(samples) for work, samples in baseline.items() if samples}

    def samples(self, phase: Phase, *, compiled: bool, settings: str | None = None) -> dict[str, tuple[float, ...]]:
        """The samples in milliseconds by the ``repr`` of their work, the latest last; waits for the GPU."""
        return {repr(work): samples.read() for work, samples in self._samples[phase, compiled, settings].items()}


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


def _most_shared(a: Mapping[str, tuple[float, ...]], b: Mapping[str, tuple[float, ...]]) -> str | None:
    return max(a.keys() & b.keys(), key=lambda work: min(len(a[work]), len(b[work])), default=None)


def _longest(samples: Mapping[str, tuple[float, ...]]) -> str:
    return max(samples, key=lambda work: len(samples[work]))
