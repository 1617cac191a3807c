"""What was measured: `CompileReport` and, for each phase, `PhaseReport`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from compile_callbacks.config import EAGER, InductorConfig
from compile_callbacks.events import CompileRecorder
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.timing import StepTimer, median_ms


@dataclass(frozen=True, kw_only=True)
class PhaseReport:
    """What compiling one phase cost and gained. What was not measured is ``None``.

    Attributes:
        mode: The settings, in a line; ``"eager"`` where the phase is not compiled.
        targets: Names of the targets.
        compile_seconds: Time spent compiling so far, forward, backward and CUDA-graph recording.
        graphs: Graphs compiled.
        graph_breaks: Places where torch ended a graph early.
        recompiles: Compiles because a guard of an earlier one failed.
        cache_hits: Graphs that came out of torch's cache on disk.
        cache_misses: Graphs that did not.
        eager_step_ms: Median of the eager baseline's steps, in milliseconds.
        compiled_step_ms: Median of compiled steps of the same work, in milliseconds.
        speedup: ``eager_step_ms / compiled_step_ms``.
        samples: Steps behind the speedup: the smaller of the two sides' counts. Without a baseline, the
            compiled steps behind ``compiled_step_ms``.
        break_even_steps: Steps after which the time saved has paid for compiling; infinite where compiled
            steps are not faster.
        fallbacks: Times that the compiler failed and the work was done eagerly.
        events: What is behind the counts, in order.
    """

    mode: str = "eager"
    targets: tuple[str, ...] = ()
    compile_seconds: float | None = None
    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    eager_step_ms: float | None = None
    compiled_step_ms: float | None = None
    speedup: float | None = None
    samples: int | None = None
    break_even_steps: float | None = None
    fallbacks: int = 0
    events: tuple[dict[str, Any], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data; an infinite ``break_even_steps`` is ``"never"``."""
        data = asdict(self) | {"targets": list(self.targets), "events": list(self.events)}
        if self.break_even_steps is not None and math.isinf(self.break_even_steps):
            data["break_even_steps"] = "never"
        return data

    def scalars(self, phase: Phase) -> dict[str, float]:
        """What was measured, under the names that loggers get."""
        if self.mode == "eager" or self.compile_seconds is None:
            return {}
        values: dict[str, float | None] = {
            f"compile/{phase}/seconds": self.compile_seconds,
            f"compile/{phase}/graphs": self.graphs,
            f"compile/{phase}/graph_breaks": self.graph_breaks,
            f"compile/{phase}/recompiles": self.recompiles,
            f"compile/{phase}/cache_hits": self.cache_hits,
            f"step/{phase}/eager_ms": self.eager_step_ms,
            f"step/{phase}/compiled_ms": self.compiled_step_ms,
            f"step/{phase}/speedup": self.speedup,
            f"step/{phase}/break_even_steps": self.break_even_steps,
        }
        return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What compiling cost and gained in a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
    """

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)

    def phase(self, phase: Phase) -> PhaseReport:
        """The report of a phase by its name."""
        return self.train if phase == "train" else self.infer

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return {phase: self.phase(phase).to_dict() for phase in PHASES}

    def scalars(self) -> dict[str, float]:
        """What was measured in both phases, under the names that loggers get."""
        return {name: value for phase in PHASES for name, value in self.phase(phase).scalars(phase).items()}

    def __str__(self) -> str:
        """A table of plain text, a row for each figure and a column for each phase."""
        rows = [(label, *(show(self.phase(phase)) for phase in PHASES)) for label, show in _ROWS]
        rows.insert(0, ("", *PHASES))
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [
            "  ".join((row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))))
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)


def build_phase_report(
    phase: Phase, mode: str, targets: tuple[str, ...], recorder: CompileRecorder, timer: StepTimer
) -> PhaseReport:
    """Put together what the recorder and the timer know of a phase."""
    compiles = recorder.of(phase, "compile")
    times = timer.times(phase)
    eager_ms, compiled_ms = median_ms(times.eager_ms), median_ms(times.compiled_ms)
    seconds = sum(event.seconds or 0 for event in compiles) if compiles else None
    speedup = eager_ms / compiled_ms if eager_ms is not None and compiled_ms else None
    counts = [len(side) for side in (times.eager_ms, times.compiled_ms) if side]
    return PhaseReport(
        mode=mode,
        targets=targets,
        compile_seconds=seconds,
        graphs=sum(event.graphs for event in compiles),
        graph_breaks=len(recorder.of(phase, "graph_break")),
        recompiles=len(recorder.of(phase, "recompile")),
        cache_hits=sum(event.cache_hits for event in recorder.of(phase, "cache")),
        cache_misses=sum(event.cache_misses for event in recorder.of(phase, "cache")),
        eager_step_ms=eager_ms,
        compiled_step_ms=compiled_ms,
        speedup=speedup,
        samples=min(counts) if counts else None,
        break_even_steps=break_even_steps(seconds, eager_ms, compiled_ms),
        fallbacks=len(recorder.of(phase, "fallback")),
        events=tuple(event.to_dict() for event in recorder.events if event.phase == phase),
    )


def uncompiled_report(configs: Mapping[Phase, InductorConfig | None]) -> CompileReport:
    """The report of settings with which nothing has run yet."""
    return CompileReport(
        **{phase: PhaseReport(mode=config.describe() if config else EAGER) for phase, config in configs.items()}
    )


def break_even_steps(compile_seconds: float | None, eager_ms: float | None, compiled_ms: float | None) -> float | None:
    """Steps after which the time saved has paid for compiling: seconds spent over seconds saved a step.

    Infinite where compiled steps are not faster, ``None`` where one of the three was not measured.
    """
    if compile_seconds is None or eager_ms is None or compiled_ms is None:
        return None
    saved_ms = eager_ms - compiled_ms
    return compile_seconds * 1000 / saved_ms if saved_ms > 0 else math.inf


def _number(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return "never" if math.isinf(value) else format(value, form)


_ROWS = (
    ("mode", lambda p: p.mode),
    ("targets", lambda p: ", ".join(p.targets) or "-"),
    ("compile seconds", lambda p: _number(p.compile_seconds, ".1f")),
    ("graphs", lambda p: str(p.graphs)),
    ("graph breaks", lambda p: str(p.graph_breaks)),
    ("recompiles", lambda p: str(p.recompiles)),
    ("cache hits / misses", lambda p: f"{p.cache_hits} / {p.cache_misses}"),
    ("eager step ms", lambda p: _number(p.eager_step_ms, ".2f")),
    ("compiled step ms", lambda p: _number(p.compiled_step_ms, ".2f")),
    ("speedup", lambda p: "-" if p.speedup is None else f"{p.speedup:.2f}x"),
    ("samples", lambda p: "-" if p.samples is None else str(p.samples)),
    ("break-even steps", lambda p: _number(p.break_even_steps, ".0f")),
    ("fallbacks", lambda p: str(p.fallbacks)),
)
