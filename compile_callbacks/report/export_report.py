"""`ExportReport`: the report that `AOTInductorExport` makes of a package."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compile_callbacks.report.console import make_table, to_text


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A package and the times of its calls. A figure that was not measured is ``None``.

    Attributes:
        path: Path of the package; ``None`` if the export failed.
        weights: The exported weights, ``"best"`` or ``"last"``.
        checkpoint: Path of the checkpoint with the best weights.
        size_mib: Size of the file, in MiB.
        export_seconds: Seconds for tracing, compiling and comparing.
        eager_ms: Median time of a call of the eager module, in milliseconds.
        package_ms: Median time of a call of the package, in milliseconds.
        samples: Number of calls for each median, the smaller one of the two.
        verified: How the package compares with eager: ``"equal"``, ``"differs"`` or ``"not compared"``; ``None`` if
            verification was off.
        max_abs_error: Largest absolute difference from eager in any output element.
        error: The reason if there is no package.
    """

    path: str | None = None
    weights: str | None = None
    checkpoint: str | None = None
    size_mib: float | None = None
    export_seconds: float | None = None
    eager_ms: float | None = None
    package_ms: float | None = None
    samples: int | None = None
    verified: str | None = None
    max_abs_error: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready data."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """Return the figures by the names that loggers get."""
        names = ("size_mib", "eager_ms", "package_ms")
        values = {"export/seconds": self.export_seconds} | {f"export/{name}": getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """Describe the package in a line."""
        if self.path is None:
            return f"no package: {self.error or 'nothing was exported yet'}"
        return (
            f"{self.path}: the {self.weights} weights, {self.size_mib:.1f} MiB; "
            f"{self.package_ms:.2f} ms a call (eager {self.eager_ms:.2f} ms; medians of {self.samples})"
        )

    def __str__(self) -> str:
        """Return a plain-text table with a row for each figure."""
        values = {name.replace("_", " "): value for name, value in self.to_dict().items() if value is not None}
        rows = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in values.items()]
        return to_text(make_table(("", "export"), rows, width=1000))  # a path stays in one line
