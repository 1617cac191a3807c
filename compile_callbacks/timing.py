"""How long steps take: clocks for CPU and GPU, and which steps are samples."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import torch

from compile_callbacks.phases import Phase

WARMUP_STEPS = 2
"""Steps left out after the way of running changes or anything compiles: allocators, cuDNN and CUDA graphs settle
in them (a CUDA graph is warmed up in its first call and recorded in its second)."""


@dataclass(frozen=True)
class StepTimes:
    """Step times of equal work, eager against compiled.

    Attributes:
        eager_ms: Eager samples, in milliseconds.
        compiled_ms: Compiled samples, in milliseconds.
    """

    eager_ms: tuple[float, ...] = ()
    compiled_ms: tuple[float, ...] = ()


class _Span:
    """The time between two points of a step; on a GPU known once the GPU has passed both."""

    def __init__(self, cuda: bool, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cuda = cuda
        self._start = self._mark()
        self._end: float | torch.cuda.Event | None = None

    def stop(self) -> None:
        self._end = self._mark()

    def milliseconds(self) -> float:
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


class StepTimer:
    """Times steps and keeps those that are samples.

    On a GPU a step is timed by CUDA events, which are read only when somebody asks: steady training is not
    synchronised. A step is no sample while anything compiles in it, nor are the `WARMUP_STEPS` after that or
    after a change between eager and compiled. Samples are compared only with samples of equal work.

    Args:
        clock: Seconds, rising; for steps on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: dict[tuple[Phase, bool], dict[Hashable, list[_Span]]] = defaultdict(lambda: defaultdict(list))
        self._milliseconds: dict[tuple[Phase, bool], dict[Hashable, list[float]]] = defaultdict(
            lambda: defaultdict(list)
        )
        self._settled: Counter[tuple[Phase, bool]] = Counter()
        self._running: _Span | None = None

    def start(self, *, cuda: bool) -> None:
        """A step begins."""
        self._running = _Span(cuda, self._clock)

    def stop(self, phase: Phase, *, compiled: bool, work: Hashable, disturbed: bool) -> bool:
        """A step ends.

        Args:
            phase: The phase it belongs to.
            compiled: Whether it ran with the compiled targets.
            work: What was to be done; steps of equal work compare equal.
            disturbed: Whether anything compiled meanwhile.

        Returns:
            Whether the step is a sample.
        """
        span, self._running = self._running, None
        if span is None:
            return False
        span.stop()
        key = phase, compiled
        if disturbed:
            self._settled[key] = 0
            return False
        self._settled[key] += 1
        if self._settled[key] <= WARMUP_STEPS:
            return False
        self._spans[key][work].append(span)
        return True

    def abandon(self) -> None:
        """Forget the step that is running."""
        self._running = None

    def times(self, phase: Phase) -> StepTimes:
        """The samples of a phase, of the work that most eager and compiled steps share.

        Where none is shared, those of the work that most steps did: with one of the two sides empty.
        """
        eager, compiled = self._read((phase, False)), self._read((phase, True))
        if shared := eager.keys() & compiled.keys():
            work = max(shared, key=lambda w: min(len(eager[w]), len(compiled[w])))
            return StepTimes(tuple(eager[work]), tuple(compiled[work]))
        if compiled:
            return StepTimes((), tuple(_longest(compiled)))
        if eager:
            return StepTimes(tuple(_longest(eager)), ())
        return StepTimes()

    def _read(self, key: tuple[Phase, bool]) -> dict[Hashable, list[float]]:
        """Turn spans into milliseconds; waits for the GPU to have passed them."""
        for work, spans in self._spans.pop(key, {}).items():
            self._milliseconds[key][work] += [span.milliseconds() for span in spans]
        return self._milliseconds.get(key, {})


def _longest(samples: Mapping[Hashable, list[float]]) -> list[float]:
    candidates = list(samples.values())
    return max(candidates, key=len)


def median_ms(samples: tuple[float, ...]) -> float | None:
    """The median, or ``None`` of nothing."""
    return statistics.median(samples) if samples else None
