"""`CompileReport`: the report of a run, as data, text and plot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from compile_callbacks._utils.files import write_json
from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.report.declaration import PhaseFacts
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.file import make_record
from compile_callbacks.report.render import to_plain_text
from compile_callbacks.tuning.tune import PhaseConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """The report of a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
    """

    train: PhaseReport = field(default_factory=PhaseReport)
    infer: PhaseReport = field(default_factory=PhaseReport)

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Create a report from `to_dict` data. A figure that is missing gets its default."""
        phases = data if isinstance(data, Mapping) else {}
        return cls(**{phase: PhaseReport.from_dict(phases.get(phase)) for phase in PHASES})

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data. An infinite number becomes ``"never"``."""
        return {phase: report.to_dict() for phase, report in self.phases.items()}

    def phase(self, phase: Phase) -> PhaseReport:
        """Return the report of a phase by its name."""
        return self.phases[phase]

    @property
    def phases(self) -> dict[Phase, PhaseReport]:
        """The reports of both phases by name."""
        return {"train": self.train, "infer": self.infer}

    def scalars(self) -> dict[str, float]:
        """Return the figures of both phases by the names of the logged scalars."""
        return self.train.scalars("train") | self.infer.scalars("infer")

    @property
    def has_figures(self) -> bool:
        """Whether a phase has a verdict, or a `Tune` has a verdict on a candidate."""
        trials = [trial for report in self.phases.values() for trial in report.diagnostics.trials]
        verdicts = self.train.verdict or self.infer.verdict or self.scalars()
        return bool(verdicts) or any(trial["verdict"] != "undecided" for trial in trials)

    def plot(self) -> Figure:
        """Plot the run as a matplotlib figure with one row for each phase.

        The plot shows the step times. Eager and compiled steps have different colors, and markers show the steps that
        compiled. ``figure.savefig("steps.png")`` writes the figure to a file.

        Raises:
            ImportError: If matplotlib is not installed.
            ValueError: If no step was timed yet.
        """
        from compile_callbacks.report.plot import plot_phases  # imported here, because it imports matplotlib

        return plot_phases(self.phases)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a JSON file, which ``compile-callbacks report`` and ``compile-callbacks check`` read.

        Creates missing folders, and replaces an existing file. The file has the format of ``compile_report.json``.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(path), [make_record(self.to_dict())])

    def __str__(self) -> str:
        """Return the verdict of each phase, a table of the figures, and what to do next, as plain text."""
        return to_plain_text(self.phases)


def measured_report(*phases: PhaseFacts) -> CompileReport:
    """Return the report of measurements. Each figure is computed when it is read, and then fixed."""
    return CompileReport(**{facts.phase: PhaseReport(facts=facts) for facts in phases})


def uncompiled_report(configs: Mapping[Phase, PhaseConfig]) -> CompileReport:
    """Return the report of a run that has not started."""
    train, infer = (PhaseReport(mode=config.describe() if (config := configs[p]) else EAGER) for p in PHASES)
    return CompileReport(train=train, infer=infer)
