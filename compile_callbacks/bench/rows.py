"""`BenchRow`: what was measured of one mode in one phase; rows as a table and as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks.phases import Phase
from compile_callbacks.reporting.report import PhaseReport
from compile_callbacks.settings.mode import EAGER

_NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """What was measured of one mode in one phase. What was not measured is ``None``.

    Attributes:
        name: What the mode was asked for by.
        phase: The phase.
        report: Compile time, step times, peak memory and counts, as for a trainer run; ``samples`` are timed blocks.
        first_step_seconds: How long the first step took, compiling included.
        timed_steps: Steps in the timed blocks.
        block_ms: Milliseconds a step, a value for each timed block.
        relative_error: Difference from eager on the first step, by the norm: of the outputs, or where that is larger
            of the gradients.
        failure: Why the mode was not measured.
        notes: What the settings ask for that this run does not have, and why.
    """

    name: str
    phase: Phase
    report: PhaseReport = field(default_factory=PhaseReport)
    first_step_seconds: float | None = None
    timed_steps: int = 0
    block_ms: tuple[float, ...] = ()
    relative_error: float | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds of a step in this mode."""
        return self.report.eager_step_ms if self.name == EAGER else self.report.compiled_step_ms

    @property
    def spread_ms(self) -> float | None:
        """Interquartile range of the same."""
        return self.report.eager_spread_ms if self.name == EAGER else self.report.compiled_spread_ms

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON-ready data; a ``relative_error`` that is not finite is ``"not finite"``."""
        error = self.relative_error
        return {
            "mode": self.name,
            "phase": self.phase,
            "failure": self.failure,
            "step_ms": self.step_ms,
            "first_step_seconds": self.first_step_seconds,
            "timed_steps": self.timed_steps,
            "relative_error": "not finite" if error is not None and not math.isfinite(error) else error,
            "notes": list(self.notes),
            "block_ms": list(self.block_ms),
            "report": self.report.to_dict(),
        }


def table(rows: Sequence[BenchRow]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The heads of a table's columns, and a row of cells for each row; columns that no row has a value for go."""
    cells = [tuple(show(row) for _, show in _COLUMNS) for row in rows]
    kept = [
        index
        for index, (head, _) in enumerate(_COLUMNS)
        if head in _ALWAYS or any(row[index] != _NOTHING for row in cells)
    ]
    return tuple(_COLUMNS[index][0] for index in kept), [tuple(row[index] for index in kept) for row in cells]


def told(rows: Sequence[BenchRow]) -> list[str]:
    """What a table has no room for, a line each: failures and notes."""
    lines = []
    for row in rows:
        said = ([f"failed: {row.failure}"] if row.failure else []) + list(row.notes)
        lines += [f"{row.name}, {row.phase}: {what}" for what in said]
    return lines


def _number(value: float | None, form: str, unit: str = "") -> str:
    if value is None:
        return _NOTHING
    return format(value, form) + unit if math.isfinite(value) else "never"


def _step(median_ms: float | None, spread_ms: float | None) -> str:
    return _number(median_ms, ".2f") + ("" if spread_ms is None else f" ± {spread_ms / 2:.2f}")


def _fallbacks(row: BenchRow) -> str:
    return _NOTHING if row.name == EAGER or row.failure else str(row.report.fallbacks)


def _error(row: BenchRow) -> str:
    if row.relative_error is None:
        return _NOTHING
    return f"{row.relative_error:.1e}" if math.isfinite(row.relative_error) else "not finite"


_COLUMNS: tuple[tuple[str, Callable[[BenchRow], str]], ...] = (
    ("mode", lambda row: row.name),
    ("compile s", lambda row: _number(row.report.compile_seconds, ".1f")),
    ("first step s", lambda row: _number(row.first_step_seconds, ".2f")),
    ("eager ms", lambda row: _step(row.report.eager_step_ms, row.report.eager_spread_ms)),
    ("compiled ms", lambda row: _step(row.report.compiled_step_ms, row.report.compiled_spread_ms)),
    ("speedup", lambda row: "failed" if row.failure else _number(row.report.speedup, ".2f", "x")),
    (
        "samples",
        lambda row: f"{len(row.block_ms)} x {row.timed_steps / len(row.block_ms):.3g}" if row.block_ms else "-",
    ),
    ("peak MB", lambda row: _number(row.report.peak_memory_mb or row.report.eager_peak_memory_mb, ".0f")),
    ("difference", _error),
    ("break-even steps", lambda row: _number(row.report.break_even_steps, ".0f")),
    ("fallbacks", _fallbacks),
)

_ALWAYS = {"mode", "compile s", "first step s", "eager ms", "compiled ms", "speedup", "samples", "difference"}
