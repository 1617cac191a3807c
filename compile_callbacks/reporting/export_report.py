"""What came of an export at the end of training: `ExportReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compile_callbacks.reporting.table import plain_table


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A package and how fast it runs. What was not measured is ``None``.

    Attributes:
        path: The package; ``None`` where there is none.
        weights: ``"best"`` or ``"last"``.
        checkpoint: The checkpoint that the best weights are from.
        size_mb: Size of the file, in MiB.
        export_seconds: How long it took to trace, to compile and to compare.
        eager_ms: Median of a call of the eager module, in milliseconds.
        compiled_ms: The same of the module as `InductorCompile` has compiled it in place, with the last weights.
        package_ms: The same of the package.
        samples: Calls behind each median: the smallest of the counts.
        verified: ``"equal"`` or ``"differs"`` from eager, or ``"left out"``; ``None`` where not compared.
        max_abs_error: Largest absolute difference from eager of an output's element.
        error: Why there is no package.
    """

    path: str | None = None
    weights: str | None = None
    checkpoint: str | None = None
    size_mb: float | None = None
    export_seconds: float | None = None
    eager_ms: float | None = None
    compiled_ms: float | None = None
    package_ms: float | None = None
    samples: int | None = None
    verified: str | None = None
    max_abs_error: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready data."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """What was measured, under the names that loggers get."""
        values = {
            "export/size_mb": self.size_mb,
            "export/seconds": self.export_seconds,
            "export/eager_ms": self.eager_ms,
            "export/compiled_ms": self.compiled_ms,
            "export/package_ms": self.package_ms,
        }
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """The package in a line."""
        if self.path is None:
            return f"no package: {self.error or 'nothing was exported yet'}"
        times = [
            (name, ms) for name, ms in (("eager", self.eager_ms), ("compiled", self.compiled_ms)) if ms is not None
        ]
        others = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times)
        return (
            f"{self.path}: the {self.weights} weights, {self.size_mb:.1f} MB; "
            f"{self.package_ms:.2f} ms a call ({others}; medians of {self.samples})"
        )

    def __str__(self) -> str:
        """A table of plain text, a row for each figure."""
        rows = [
            ("package", self.path),
            ("weights", self.weights),
            ("checkpoint", self.checkpoint),
            ("size MB", _number(self.size_mb, ".1f")),
            ("export seconds", _number(self.export_seconds, ".1f")),
            ("eager ms", _number(self.eager_ms, ".2f")),
            ("compiled ms", _number(self.compiled_ms, ".2f")),
            ("package ms", _number(self.package_ms, ".2f")),
            ("samples", _number(self.samples, "d")),
            ("equal to eager", self.verified),
            ("max abs error", _number(self.max_abs_error, ".1e")),
            ("failed", self.error),
        ]
        shown = [(label, value) for label, value in rows if value is not None]
        return plain_table([("", "export")], shown, widest=max(len(value) for _, value in shown) if shown else 1)


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
