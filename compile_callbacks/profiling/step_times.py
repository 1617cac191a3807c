"""`PhaseTimes`: times the steps of a phase, and decides which step times are samples.

A *sample* is the time of a step that may be compared with other samples.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks._utils.phases import EAGER, WAITING, Phase
from compile_callbacks.config.inductor_config import EAGER_VARIANT, Variant
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.comparison import MIN_SAMPLES, Comparison, compare, median_ms

WARMUP_STEPS = 2
"""The number of steps without a sample after a compile, and after a change between eager and compiled. In these steps,
allocators and cuDNN warm up. torch warms up a CUDA graph in its first call, and records it in the second call."""

WINDOW_STEPS = 10
"""The number of steps in a window, as many as the eager baseline has by default."""

MAX_WINDOWS = 16
"""The number of windows after which a record drops every second window."""

_PEAK_STEPS = 5
"""Number of steps after a compile whose memory is measured, including the recording of a CUDA graph. Reading the
allocator's statistics in each step would take too long."""

StepKind = Literal["eager", "compiled"]
"""The kind of a step. A step is compiled if a compiled graph of this library ran in it."""


class Workload(NamedTuple):
    """The data and conditions of a step. Two steps can be compared if their workloads are equal."""

    loader: str  # the stage and the number of its dataloader
    conditions: str = ""  # gradient accumulation, precision, and the set of trained weights
    shapes: Any = ()  # the signature of the batch: its structure, and the shapes and dtypes of its tensors


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One step: the processing of one batch, from its start to its end."""

    variant: Variant = EAGER_VARIANT  # that the contest chose
    first: bool = False  # of its stage or epoch
    repeats: PhaseTimes | None = None  # counts the further steps for which this one stands
    before: tuple[int, int] = 0, 0  # the recorder's numbers of compiles and of executed graphs at the start
    start: Any = 0.0  # a result of `clock.now`
    timed_on: torch.device | None = None  # the device that measures the time, or ``None`` if the step is not timed
    # Known at the end of the step:
    end: Any = None  # a result of `clock.now`
    kind: StepKind = "eager"
    compiling: bool = False  # whether torch compiled during the step
    number: int = 0  # in the phase, from 1
    workload: Workload | None = None  # of a timed step
    is_sample: bool = False  # whether its time may be compared with other steps of the workload

    def milliseconds(self, *, wait: bool = False) -> float | None:
        """Return the time, or ``None`` if the device has not passed the end yet and the caller does not ``wait``."""
        if not isinstance(self.end, float):
            if not (wait or self.end.query()):
                return None
            self.end.synchronize()
            self.start, self.end = 0.0, self.start.elapsed_time(self.end) / 1000
        return float(self.end - self.start) * 1000


class StepTimes(NamedTuple):
    """Step times of equal workload, eager and compiled."""

    eager_ms: Sequence[float] = ()  # eager samples, in milliseconds
    windows: Sequence[Sequence[float]] = ()  # compiled samples, in the windows in which they were measured
    workload: Workload | None = None  # ``None`` if there are no samples

    @property
    def compiled_ms(self) -> Sequence[float]:
        """Compiled samples, in milliseconds."""
        return list(itertools.chain(*self.windows))

    @property
    def comparison(self) -> Comparison | None:
        """The comparison of the eager steps with the compiled steps, or ``None`` for too few samples."""
        return compare([self.eager_ms], self.windows)

    @property
    def saved_share(self) -> float:
        """The saved time of a compiled step divided by its time, or 0 if no difference is shown."""
        found = self.comparison
        return found.ratio - 1 if found and found.outcome in ("faster", "slower") else 0.0


@dataclass(slots=True)
class _Record:
    """The steps of one kind with one loader. The timed steps are in windows that are spread evenly over the run.

    A window contains steps that run after each other, like the eager baseline, and as many untimed steps follow it.
    With `MAX_WINDOWS` windows, the record drops every second window, and doubles the distance of further windows. In
    steps, this distance is odd, because with gradient accumulation every second or fourth step differs from the others,
    and windows must not always begin with the same.
    """

    candidate: str | None = None
    kind: StepKind = "eager"
    compiling: bool = False
    loader: str = ""  # the stage and the number of its dataloader
    steps: int = 0
    windows: list[list[Step]] = field(default_factory=lambda: [[]])
    untimed: int = 0  # the number of the next steps that need no timing
    distance: int = 2  # of the begins of two windows, in windows

    def add(self, timed: Step) -> None:
        """Add a timed step."""
        self.windows[-1].append(timed)
        if len(self.windows[-1]) == WINDOW_STEPS:
            self.untimed = (self.distance - 1) * WINDOW_STEPS + 1
            if len(self.windows) == MAX_WINDOWS:
                self.windows, self.distance = self.windows[::2], 2 * self.distance
            self.windows.append([])

    def timed(self) -> list[tuple[Step, float]]:
        """Return the timed steps and their milliseconds, without those that the device still runs."""
        return [(step, ms) for window in self.windows for step in window if (ms := step.milliseconds()) is not None]

    def typical_ms(self) -> float:
        """Return the median of the samples, or 0 without samples."""
        return median_ms([ms for step, ms in self.timed() if step.is_sample]) or 0.0


class PhaseTimes:
    """Times the steps of a phase, and keeps the samples, as the page "How times are measured" describes.

    On a GPU, CUDA events measure the steps, and are read after the GPU has passed them, so that nothing synchronizes
    training.
    """

    def __init__(self, phase: Phase) -> None:
        self.number = 0
        """The number of finished steps."""
        self.last = _Record()
        """The record of the last step. The next step is like it if nothing changes. Its ``untimed`` counts steps
        that need no timing: two CUDA events take 50 µs to 250 µs of CPU time, and reading the batch takes 10 µs.
        `Session` counts repeated steps there itself, because a call takes longer."""
        self._phase = phase
        self._records: dict[Any, _Record] = {}
        self.peak_mib: dict[str | None, float] = {}
        """The peak of the CUDA allocator in steps of each variant, if a step raised that of the process. Nothing resets
        it, because the user's own code may read it. With CUDA graphs, only the recording allocates memory."""
        self.peak_before: int | None = None
        """The process's peak of GPU memory when the running step began, or ``None`` if it is not measured."""
        self._shapes: set[int] = set()  # hashes of the shapes that the steps of a variant had
        self._since_compile: Counter[str | None] = Counter()  # steps of each variant
        self._last_timed = Step(end=0.0)

    # ------------------------------------------------------------------------------------------ a step

    def begin(self, step: Step, device: torch.device, *, wanted: bool) -> None:
        """Begin a step, whose time may be ``wanted``. ``step.start`` has the time of the CPU already."""
        if wanted or not self.last.untimed:
            step.timed_on, step.start = device, clock.now(device)
        else:
            self.last.untimed -= 1
        is_measured = device.type == "cuda" and self._since_compile[step.variant.name] < _PEAK_STEPS
        self.peak_before = torch.cuda.max_memory_allocated() if is_measured else None

    def end(self, step: Step, loader: str) -> None:
        """End a step, and set whether its time is a sample."""
        self.number += 1
        step.number, candidate, since = self.number, step.variant.name, self._since_compile
        key = candidate, step.kind, step.compiling, loader
        record = self._records.get(key) or self._records.setdefault(key, _Record(*key))
        record.steps += 1
        if candidate != self.last.candidate:
            since[candidate] = min(since[candidate], WARMUP_STEPS - 1)
        since[candidate] = 0 if step.compiling else since[candidate] + 1
        before, self.peak_before = self.peak_before, None
        if before is not None and (peak := torch.cuda.max_memory_allocated()) > before:
            self.peak_mib[candidate] = peak / 2**20
        if not step.compiling:
            self.last = record
            if step.timed_on is None:
                return
        workload = None if step.compiling else step.workload
        step.end = clock.now(step.timed_on, start=step.start, phase=self._phase, candidate=candidate, workload=workload)
        # A step that ran eagerly although its variant compiles is a sample of neither.
        is_of_kind = step.kind != "eager" or step.variant.config is None
        # For new shapes, libraries select kernels, which may take longer than the step (as for attention on a GPU).
        shapes = hash((candidate, step.kind, workload and workload.shapes))
        is_known = workload is not None and shapes in self._shapes
        self._shapes.add(shapes)  # of timed steps only, whose number is limited
        step.is_sample = since[candidate] > WARMUP_STEPS and is_known and is_of_kind
        record.add(step)
        self._last_timed = step

    def forget(self, candidate: str | None) -> None:
        """Let no step of a candidate so far be a sample, because its later steps run other code."""
        windows = [record.windows for record in self._records.values() if record.candidate == candidate]
        for step in itertools.chain(*itertools.chain(*windows)):
            step.is_sample = False

    # ------------------------------------------------------------------------------------------ results

    def synchronize(self) -> None:
        """Wait for the GPU to pass all steps so far. Without it, the figures omit steps that the GPU still runs."""
        self._last_timed.milliseconds(wait=True)

    def steps(self, candidate: str | None = None) -> Counter[StepKind]:
        """Return the number of steps of a candidate by kind, including steps without a sample."""
        steps: Counter[StepKind] = Counter()
        for record in self._records.values():
            steps[record.kind] += record.steps * (record.candidate == candidate)
        return +steps

    def windows(self, candidate: str | None, kind: StepKind = "compiled") -> Mapping[Workload, list[list[float]]]:
        """Return the samples in milliseconds by workload, in windows."""
        by_workload: defaultdict[Workload, list[list[float]]] = defaultdict(list)
        for key, record in self._records.items():
            for window in record.windows if key[:3] == (candidate, kind, False) else ():
                samples = [(s.workload, ms) for s in window if s.is_sample and (ms := s.milliseconds()) is not None]
                for workload in dict.fromkeys(workload for workload, _ in samples if workload):
                    by_workload[workload].append([ms for other, ms in samples if other == workload])
        return by_workload

    def compared(self, candidate: str | None = None) -> StepTimes:
        """Return the step times of the workload that has the most compiled samples, in a stage with eager samples."""
        eager, compiled = self.windows(EAGER, "eager"), self.windows(candidate)
        stages = {workload.loader for workload in eager}  # a later call of another kind has no eager steps
        windows = {of: found for of, found in compiled.items() if of.loader in stages} or compiled or eager
        counts = Counter({workload: sum(map(len, found)) for workload, found in windows.items()})
        for workload, _ in counts.most_common(1):
            return StepTimes(list(itertools.chain(*eager.get(workload, ()))), compiled.get(workload, ()), workload)
        return StepTimes()

    def savings(self, candidate: str | None = None, seconds_outside_steps: float = 0.0) -> tuple[float, float] | None:
        """Return the net seconds that all steps saved, and the compiled steps that break even, or infinity.

        Without a factor between eager and compiled steps, return ``None``. The costs are steps in which torch compiled,
        ``seconds_outside_steps``, and the time that other candidates of a `Tune` lost. Each compiled step saves the
        share of its time by which the medians of `compared` differ, or nothing if the verdict is no difference, so all
        figures agree. In a stage without eager steps, only the steps in which torch compiled count. The break-even is
        about steps of ``candidate``.
        """
        reported = self.compared(candidate)
        found = reported.comparison
        if len(reported.eager_ms) < MIN_SAMPLES or (found and found.outcome == "not comparable"):
            return None
        records, cost_ms, saved_ms, count = self._records.values(), seconds_outside_steps * 1000, 0.0, 0
        eager = {r.loader: ms for r in records if r.candidate == EAGER and not r.compiling and (ms := r.typical_ms())}
        for record in records:
            usual_ms = eager.get(record.loader, 0.0)
            if record.compiling:
                cost_ms += sum(ms for _, ms in record.timed()) - record.steps * usual_ms
            elif record.candidate == WAITING and (ms := record.typical_ms()):
                cost_ms += record.steps * (ms - usual_ms)
            elif record.kind != "eager" and usual_ms:
                saved = record.steps * record.typical_ms() * self.compared(record.candidate).saved_share
                if record.candidate == candidate:
                    saved_ms, count = saved_ms + saved, count + record.steps
                else:
                    cost_ms -= saved
        break_even_steps = max(0.0, cost_ms * count / saved_ms) if saved_ms > 0 else math.inf
        return (saved_ms - cost_ms) / 1000, break_even_steps

    def series(self) -> tuple[dict[str, Any], ...]:
        """Return the step times as one mapping for each kind of step and candidate: the figure ``series``."""
        points: defaultdict[tuple[str, str | None], list[tuple[int, float]]] = defaultdict(list)
        for record in self._records.values():
            kind = "compiling" if record.compiling else record.kind
            candidate = None if record.candidate == EAGER else record.candidate
            points[kind, candidate] += [(step.number, float(f"{ms:.4g}")) for step, ms in record.timed()]
        return tuple(
            {"kind": kind, "candidate": candidate, "steps": [n for n, _ in ordered], "ms": [ms for _, ms in ordered]}
            for (kind, candidate), unsorted in points.items()
            if (ordered := sorted(unsorted))
        )
