"""`CompileReport`: the report of a run, as data, text and plot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compile_callbacks._utils.files import write_json
from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.report.declaration import Figures, PhaseFacts, figure
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.file import make_record
from compile_callbacks.report.render import to_plain_text
from compile_callbacks.tuning.tune import PhaseConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class CompileReport(Figures):
    """The report of a run.

    Attributes:
        train: The train phase.
        infer: The infer phase.
    """

    facts: Mapping[Phase, PhaseFacts]

    @figure(default=PhaseReport())
    def train(self) -> PhaseReport:
        """The train phase."""
        return PhaseReport(facts=self.facts["train"])

    @figure(default=PhaseReport())
    def infer(self) -> PhaseReport:
        """The infer phase."""
        return PhaseReport(facts=self.facts["infer"])

    def phase(self, phase: Phase) -> PhaseReport:
        """Return the report of a phase by its name."""
        return self.phases[phase]

    @property
    def phases(self) -> dict[Phase, PhaseReport]:
        """The reports of both phases by name."""
        return {"train": self.train, "infer": self.infer}

    def scalars(self) -> dict[str, float]:  # type: ignore[override]  # a phase has its own scalars
        """Return the figures of both phases by the names of the logged scalars."""
        return self.train.scalars("train") | self.infer.scalars("infer")

    @property
    def has_figures(self) -> bool:
        """Whether a phase has a verdict or a scalar, or a `Tune` has a verdict on a candidate."""
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


def uncompiled_report(configs: Mapping[Phase, PhaseConfig]) -> CompileReport:
    """Return the report of a run that has not started."""
    modes = {phase: config.describe() if (config := configs[phase]) else EAGER for phase in PHASES}
    return CompileReport(**{phase: PhaseReport(mode=mode) for phase, mode in modes.items()})
