"""Runs every mode on copies of one module, and measures them in alternating blocks of steps."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from compile_callbacks.bench.rows import BenchRow
from compile_callbacks.bench.settings import BenchSettings
from compile_callbacks.bench.subject import Subject
from compile_callbacks.bench.way import Way
from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.measuring.events import EventKind
from compile_callbacks.measuring.timing import StepTimer, median_ms, spread_ms
from compile_callbacks.phases import Phase
from compile_callbacks.reporting.report import PhaseReport, break_even_steps, build_phase_report
from compile_callbacks.settings.config import InductorConfig
from compile_callbacks.settings.mode import EAGER

BLOCKS = 10
"""Timed blocks of each mode at most: enough to see how far they lie apart."""


class BenchError(ValueError):
    """The module does not run eagerly: there is nothing to compare with."""


@dataclass
class _Candidate:
    """A mode while it is measured."""

    name: str
    config: InductorConfig | None
    way: Way | None = None
    failure: str | None = None
    relative_error: float | None = None
    notes: tuple[str, ...] = ()


def measure(
    subject: Subject, settings: BenchSettings, say: Callable[[str], None] = lambda line: None
) -> list[BenchRow]:
    """Measure every mode in every phase. A mode that fails is a row that says why.

    Eager and all modes run in turn, a block of steps each, so that what slows the machine down for a while slows down
    all of them. Each has a copy of the module, and all of them are held at the same time.

    Args:
        subject: The module and its inputs.
        settings: What is measured.
        say: Takes a line of text, while minutes pass.

    Raises:
        BenchError: The module fails eagerly.
    """
    on_device = torch.cuda.device(settings.device) if settings.device.type == "cuda" else contextlib.nullcontext()
    with on_device, warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)  # the rows say it
        return [row for phase in settings.phases for row in _phase_rows(subject, settings, phase, say)]


def _phase_rows(subject: Subject, settings: BenchSettings, phase: Phase, say: Callable[[str], None]) -> list[BenchRow]:
    candidates = [_Candidate(name, config) for name, config in settings.configs.items()]
    eager = candidates[0]

    def refuse_if_eager_failed() -> None:
        if eager.failure is not None:
            what = "a train step" if phase == "train" else "inference"
            raise BenchError(
                f"{settings.module!r} fails eagerly in {what} on inputs of {subject.shapes()}: {eager.failure}"
            )

    try:
        expected: list[list[torch.Tensor]] = []
        for candidate in candidates:
            with _failing(candidate):
                way = candidate.way = Way(candidate.name, subject, phase, candidate.config, settings, say)
                results = way.prepare()
                expected = expected or results
                candidate.failure = _not_compiled(way)
                if candidate is not eager and candidate.failure is None:
                    _compare(candidate, way, eager, results, expected)
                    candidate.notes += tuple(_idle_settings(way, settings.device))
            refuse_if_eager_failed()
        del expected
        running = ", ".join(candidate.name for candidate in candidates if candidate.failure is None)
        say(f"timing {settings.steps} {phase} steps of each: {running}")
        for steps in block_sizes(settings.steps):
            for candidate in candidates:
                with _failing(candidate):
                    if candidate.way is not None and candidate.failure is None:
                        candidate.way.time(steps)
            refuse_if_eager_failed()
        return [_row(candidate, eager, phase) for candidate in candidates]
    finally:
        for candidate in candidates:
            if candidate.way is not None:
                candidate.way.end()


def block_sizes(steps: int) -> list[int]:
    """How many steps each timed block has, the same number but for one.

    Example::

        >>> block_sizes(24), block_sizes(3)
        ([3, 3, 3, 3, 2, 2, 2, 2, 2, 2], [1, 1, 1])
    """
    blocks = min(steps, BLOCKS)
    return [steps // blocks + (index < steps % blocks) for index in range(blocks)]


def relative_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The norm of the difference of two lists of tensors over that of the second; NaN and infinity equal themselves.

    Example::

        >>> relative_error([torch.tensor([3.0, 4.0])], [torch.tensor([3.0, 5.0])])
        0.17149858514250882
    """
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        return math.inf
    apart = norm = 0.0
    for a, e in zip(actual, expected, strict=True):
        a, e = a.double(), e.double()
        same = (a == e) | (a.isnan() & e.isnan())
        apart += float(torch.where(same, 0, a - e).square().sum())
        norm += float(torch.where(e.isfinite(), e, 0).square().sum())
    error = math.sqrt(apart) / max(math.sqrt(norm), 1e-30)
    return error if math.isfinite(error) else math.inf


@contextlib.contextmanager
def _failing(candidate: _Candidate) -> Iterator[None]:
    """What fails within is the candidate's failure, and nobody else's."""
    try:
        yield
    except Exception as error:
        candidate.failure = in_one_line(describe_failure(error))


def _not_compiled(way: Way) -> str | None:
    """Why nothing of a way is compiled, whose times would be those of eager; ``None`` where something is."""
    if way.config is None or any(event.graphs for event in way.recorder.of(way.phase, "compile")):
        return None
    events = way.recorder.of(way.phase, "fallback") + way.recorder.of(way.phase, "graph_break")
    reasons = [event.reason for event in events if event.reason]
    return in_one_line(reasons[0]) if reasons else "no graph was compiled, and torch gives no reason"


def _compare(
    candidate: _Candidate,
    way: Way,
    eager: _Candidate,
    results: list[list[torch.Tensor]],
    expected: list[list[torch.Tensor]],
) -> None:
    if eager.way is not None and eager.way.drew_random_numbers:
        candidate.notes += ("not compared with eager: it draws random numbers, and compiled code draws others",)
        return
    error = max(relative_error(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    allowed = way.tolerance()
    if not error <= allowed:
        candidate.notes += (f"differs from eager by {error:.2g} of its norm, where rounding may make {allowed:.2g}",)
    candidate.relative_error = error


def _idle_settings(way: Way, device: torch.device) -> Iterator[str]:
    """What the settings of a way ask for, and what it runs without."""
    if way.config is None:
        return
    if way.config.uses_cudagraphs and device.type != "cuda":
        yield "CUDA graphs have no effect without a GPU"
    if way.config.freezes and way.phase == "train":
        yield "freezing has no effect in training"
    for kind in _SHORTCOMINGS:
        reasons = dict.fromkeys(event.reason for event in way.recorder.of(way.phase, kind) if event.reason)
        said = "" if kind == "template" else f"{kind.replace('_', ' ')}: "  # whose reason names it
        yield from (f"{said}{in_one_line(reason)}" for reason in reasons)


_SHORTCOMINGS: tuple[EventKind, ...] = ("template", "fallback", "cudagraph_skip", "pass_skipped")


def _row(candidate: _Candidate, eager: _Candidate, phase: Phase) -> BenchRow:
    way = candidate.way
    if way is None or eager.way is None or candidate.failure is not None:
        report = PhaseReport(mode=candidate.config.describe() if candidate.config else EAGER)
        return BenchRow(name=candidate.name, phase=phase, report=report, failure=candidate.failure)
    way.recorder.collect()
    eager_ms, block_ms = tuple(eager.way.block_ms), tuple(way.block_ms)
    report = build_phase_report(phase, candidate.config, (), way.recorder, StepTimer(), way.memory)
    report = replace(
        report,
        targets=(candidate.name,) if candidate.config else (),
        eager_step_ms=median_ms(eager_ms),
        eager_spread_ms=spread_ms(eager_ms),
        eager_peak_memory_mb=eager.way.peak_memory_mb(),
        samples=min(len(eager_ms), len(block_ms)) or None,
    )
    if candidate is not eager:
        compiled_ms = median_ms(block_ms)
        report = replace(
            report,
            compiled_step_ms=compiled_ms,
            compiled_spread_ms=spread_ms(block_ms),
            peak_memory_mb=way.peak_memory_mb(),
            speedup=report.eager_step_ms / compiled_ms if report.eager_step_ms and compiled_ms else None,
            break_even_steps=break_even_steps(report.compile_seconds, report.eager_step_ms, compiled_ms),
        )
    return BenchRow(
        name=candidate.name,
        phase=phase,
        report=report,
        first_step_seconds=way.first_step_seconds,
        timed_steps=way.timed_steps,
        block_ms=block_ms,
        relative_error=candidate.relative_error,
        notes=candidate.notes,
    )
