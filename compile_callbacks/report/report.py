"""`CompileReport`: the report of a run, as data, text and plot. `ExportReport`: the report of an export."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compile_callbacks._utils.files import write_json
from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.report.console import make_table, to_plain_text, to_text
from compile_callbacks.report.data import PhaseReport, RunReport
from compile_callbacks.report.figures import Data
from compile_callbacks.report.file import make_record
from compile_callbacks.tuning.tune import PhaseConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class CompileReport(RunReport):
    """The report of a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
    """

    def plot(self) -> Figure:
        """Plot the run as a matplotlib figure with one row for each phase.

        The plot shows the step times. Eager and compiled steps have different colors, and markers show the steps that
        compiled. ``figure.savefig("steps.png")`` writes the figure to a file.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If no step was timed yet.
        """
        from compile_callbacks.report.plot import plot_report  # imported here, because it imports matplotlib

        return plot_report(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a JSON file, which ``compile-callbacks report`` and ``compile-callbacks check`` read.

        Creates missing folders, and replaces an existing file. The file has the format of ``compile_report.json``.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(path), [make_record(self)])

    def __str__(self) -> str:
        """Return the verdict of each phase, a table of the figures, and what to do next, as plain text."""
        return to_plain_text(self)


def uncompiled_report(configs: Mapping[Phase, PhaseConfig]) -> CompileReport:
    """Return the report of a run that has not started."""
    train, infer = (PhaseReport(mode=config.describe() if (config := configs[p]) else EAGER) for p in PHASES)
    return CompileReport(train=train, infer=infer)


@dataclass(frozen=True, kw_only=True)
class ExportReport(Data):
    """The report of an export. A figure that was not measured is ``None``.

    Attributes:
        path: Path of the package, or ``None`` if the export failed.
        weights: The exported weights, ``"best"`` or ``"last"``.
        checkpoint: Path of the checkpoint with the best weights.
        size_mib: Size of the file, in MiB.
        export_seconds: Seconds for tracing, compiling and comparing.
        eager_ms: Median time of a call of the eager module, in milliseconds.
        package_ms: Median time of a call of the package, in milliseconds.
        samples: Number of timed eager calls or of timed package calls, whichever is smaller.
        verified: The result of the comparison with eager: ``"equal"``, ``"differs"`` or ``"not compared"``. ``None`` if
            ``verify="off"``.
        max_abs_error: Largest absolute difference from eager in any output element.
        error: The reason why the export failed.
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

    def scalars(self) -> dict[str, float]:
        """Return the figures by the names of the logged scalars."""
        names = ("size_mib", "eager_ms", "package_ms")
        values = {"export/seconds": self.export_seconds} | {f"export/{name}": getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def describe(self) -> str:
        """Describe the package in one line."""
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
        return to_text(make_table(("", "export"), rows, width=1000))  # wide enough for a path in one line
