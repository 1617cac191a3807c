"""Measures every mode on copies of one module, in alternating blocks of steps."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.cli.bench_candidate import Candidate, Subject
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import EAGER
from compile_callbacks.profiling.step_timer import median_ms, spread_ms
from compile_callbacks.report.file import environment

_BLOCKS = 10
_LEAST_SAMPLES = 5  # timed blocks that a speedup needs


class BenchError(ValueError):
    """The module fails in eager mode, so that there is no baseline."""


def measure(
    subject: Subject,
    modes: Mapping[str, InductorConfig | None],
    phase: Phase,
    *,
    steps: int,
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Measure eager and every mode. A mode that fails is a row with the reason.

    Every mode has a copy of the module, and all copies are in memory at the same time. Blocks of steps alternate
    between the modes, so that a disturbance of the machine affects all of them.

    Args:
        subject: The module and its inputs.
        modes: The settings by name, without eager.
        phase: The phase to measure.
        steps: Timed steps of each mode, rounded up to whole blocks.
        dtype: The dtype of autocast; ``None`` for no autocast.
        say: Called with lines of progress.

    Returns:
        One JSON-ready row for each mode, eager first; docs/cli.md explains the fields.

    Raises:
        BenchError: The module fails in eager mode.
    """
    candidates = [Candidate(name, modes.get(name), subject, phase, dtype) for name in (EAGER, *modes)]
    eager = candidates[0]
    on_device = torch.cuda.device(subject.device) if subject.device.type == "cuda" else contextlib.nullcontext()
    try:
        with on_device, warnings.catch_warnings():
            warnings.simplefilter("ignore", CompileWarning)  # the rows have the same reasons
            for candidate in candidates:
                say(f"preparing {candidate.name} for {phase}")
                candidate.attempt(candidate.prepare)
                if eager.failure:
                    raise BenchError(f"{subject.name!r} fails in eager mode on {subject.shapes()}: {eager.failure}")
                candidate.failure = candidate.failure or _why_not_compiled(candidate)
            blocks = min(steps, _BLOCKS)
            timers = {
                candidate.name: functools.partial(candidate.attempt, candidate.time, math.ceil(steps / blocks))
                for candidate in candidates
            }
            say(f"timing {phase} steps")
            samples = alternate(timers, blocks)
        return [_row(candidate, eager, samples) for candidate in candidates]
    finally:
        for candidate in candidates:
            candidate.close()


def alternate(timers: Mapping[str, Callable[[], float | None]], blocks: int) -> dict[str, list[float]]:
    """Call functions that return the time of a block, or ``None``, in turn; reverse the order after each round."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(blocks):
        for name in reversed(samples) if number % 2 else samples:
            if (milliseconds := timers[name]()) is not None:
                samples[name].append(milliseconds)
    return samples


def summarize(block_ms: Sequence[float]) -> dict[str, Any]:
    """The median and the interquartile range of the times of blocks, and their number."""
    samples = tuple(block_ms)
    return {"step_ms": median_ms(samples), "spread_ms": spread_ms(samples), "samples": len(samples)}


def as_result(
    title: str, rows: Sequence[Mapping[str, Any]], command: str, found: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Rows as JSON-ready data; ``found`` is the `environment` of the process that ran the steps, if not this one."""
    found = found or environment()
    versions = {name: found.get(name) for name in ("python", "torch", "triton", "lightning")}
    head = {"title": title, "date": dt.datetime.now(dt.UTC).date().isoformat(), "device": found["device"]}
    return {**head, "versions": versions, "command": command, "rows": list(rows)}


def relative_error(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The norm of the difference divided by the norm of ``expected``, over all tensors together."""
    if [tensor.shape for tensor in actual] != [tensor.shape for tensor in expected]:
        return math.inf
    pairs = [(a.double(), e.double()) for a, e in zip(actual, expected, strict=True)]
    difference = sum(float((a - e).square().sum()) for a, e in pairs)
    return math.sqrt(difference) / max(math.sqrt(sum(float(e.square().sum()) for _, e in pairs)), 1e-30)


def _why_not_compiled(candidate: Candidate) -> str | None:
    """The reason why no graph was compiled; ``None`` if one was, and for eager."""
    recorder, phase = candidate.recorder, candidate.phase
    if candidate.config is None or any(event.graphs for event in recorder.events_of(phase, "compile")):
        return None
    events = [*recorder.events_of(phase, "fallback"), *recorder.events_of(phase, "graph_break")]
    reasons = [event.reason for event in events if event.reason]
    return in_one_line(reasons[0]) if reasons else "no graph was compiled, and torch gives no reason"


def _row(candidate: Candidate, eager: Candidate, samples: Mapping[str, list[float]]) -> dict[str, Any]:
    recorder, phase = candidate.recorder, candidate.phase
    row: dict[str, Any] = {"mode": candidate.name, "phase": phase, "failure": candidate.failure}
    if candidate.failure:
        return row
    block_ms, eager_ms = tuple(samples[candidate.name]), tuple(samples[EAGER])
    step_ms, eager_step_ms = median_ms(block_ms), median_ms(eager_ms)
    row |= summarize(block_ms)
    row |= {"first_step_seconds": candidate.first_step_seconds, "peak_memory_mib": candidate.peak_memory_mib}
    if candidate is eager:
        return row
    compiles = recorder.events_of(phase, "compile")
    seconds = sum(event.seconds or 0.0 for event in compiles)
    speedup = break_even_steps = None
    if step_ms and eager_step_ms and min(len(block_ms), len(eager_ms)) >= _LEAST_SAMPLES:
        speedup = eager_step_ms / step_ms
        break_even_steps = math.ceil(seconds * 1000 / (eager_step_ms - step_ms)) if speedup > 1 else None
    error, note = _compare(candidate, eager)
    changed = {run["name"] for _, run in recorder.pass_runs if run.get("changed") or run.get("from_cache")}
    return row | {
        "speedup": speedup,
        "compile_seconds": seconds,
        "break_even_steps": break_even_steps,
        "relative_error": error,
        "graphs": sum(event.graphs for event in compiles),
        "graph_breaks": len(recorder.events_of(phase, "graph_break")),
        "fallbacks": len(recorder.events_of(phase, "fallback")),
        "passes": sorted(changed),
        "notes": [*note, *_idle_settings(candidate)],
    }


def _compare(candidate: Candidate, eager: Candidate) -> tuple[float | None, list[str]]:
    """The larger relative error of outputs and gradients, and a note if rounding does not explain it."""
    if eager.draws_random_numbers:
        return None, ["not compared with eager: the module draws random numbers"]
    error = max(relative_error(ours, theirs) for ours, theirs in zip(candidate.results, eager.results, strict=True))
    # A GPU may compute in TF32, which has the precision of float16.
    coarse = candidate.dtype is not None or any(
        weight.is_cuda or weight.itemsize < 4 for weight in eager.module.parameters()
    )
    if error <= (allowed := 0.1 if coarse else 0.01):
        return error, []
    note = f"differs from eager: relative error {error:.2g}, rounding explains at most {allowed}"
    return error if math.isfinite(error) else None, [note]


def _idle_settings(candidate: Candidate) -> Iterator[str]:
    """Settings that have no effect in this run."""
    config = candidate.config
    if config is not None and config.uses_cudagraphs and candidate.peak_memory_mib is None:
        yield "CUDA graphs have no effect without a GPU"
    if config is not None and config.freezes and candidate.phase == "train":
        yield "freezing has no effect in training"
    for kind in ("template", "fallback", "cudagraph_skip", "pass_skipped"):
        reasons = {event.reason for event in candidate.recorder.events if event.kind == kind and event.reason}
        yield from (f"{kind.replace('_', ' ')}: {in_one_line(reason)}" for reason in sorted(reasons))
