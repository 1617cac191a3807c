"""The report of an export: `ExportReport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from compile_callbacks.report.console import make_table, to_text


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A package and the time of its calls. A figure that was not measured is ``None``.

    Attributes:
        path: The package; ``None`` if there is none.
        weights: ``"best"`` or ``"last"``.
        checkpoint: The checkpoint of the best weights.
        size_mib: Size of the file, in MiB.
        export_seconds: Seconds for tracing, compiling and comparing.
        eager_ms: Median time of a call of the eager module, in milliseconds.
        package_ms: The same of the package.
        samples: Number of calls behind each median, the smaller of the two counts.
        verified: ``"equal"`` or ``"differs"`` from eager, or ``"not compared"``; ``None`` if verification was off.
        max_abs_error: Largest absolute difference from eager in any output element.
        error: Why there is no package.
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
        """The report as JSON-ready data."""
        return asdict(self)

    def scalars(self) -> dict[str, float]:
        """The figures by the names that loggers get."""
        names = ("size_mib", "eager_ms", "package_ms")
        values = {"export/seconds": self.export_seconds} | {f"export/{name}": getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """The package in a line."""
        if self.path is None:
            return f"no package: {self.error or 'nothing was exported yet'}"
        return (
            f"{self.path}: the {self.weights} weights, {self.size_mib:.1f} MB; "
            f"{self.package_ms:.2f} ms a call (eager {self.eager_ms:.2f} ms; medians of {self.samples})"
        )

    def __str__(self) -> str:
        """A plain-text table with a row for each figure."""
        values = {name.replace("_", " "): value for name, value in self.to_dict().items() if value is not None}
        rows = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in values.items()]
        return to_text(make_table(("", "export"), rows, width=1000))  # a path stays in one line
