"""Results as files: JSON, a plot, and event files for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compile_callbacks.bench.plot import plot
from compile_callbacks.bench.rows import BenchRow
from compile_callbacks.bench.settings import BenchSettings
from compile_callbacks.bench.subject import Subject
from compile_callbacks.reporting.environment import environment
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.settings.mode import EAGER


def write_results(rows: Sequence[BenchRow], settings: BenchSettings, subject: Subject) -> list[str]:
    """Write ``results.json``, ``step_ms.png`` and a folder of event files for each mode; those of before are replaced.

    Args:
        rows: What was measured.
        settings: With the folder to write to.
        subject: What was measured it of.

    Returns:
        A line for each thing that was written, or that was not, and why.

    Raises:
        OSError: Something cannot be written.
    """
    folder = settings.output
    folder.mkdir(parents=True, exist_ok=True)
    results, picture = folder / "results.json", folder / "step_ms.png"
    data = {
        "settings": settings.to_dict(),
        "inputs": subject.shapes(),
        "environment": environment(),
        "rows": [row.to_dict() for row in rows],
    }
    results.write_text(json.dumps(data, indent=2) + "\n")
    lines = [f"results: {results}"]
    try:
        plot(rows, title(settings, subject), picture)
        lines.append(f"plot: {picture}")
    except ImportError as error:
        picture.unlink(missing_ok=True)  # that of an earlier run
        lines.append(f"no plot: matplotlib cannot be imported ({error}): pip install matplotlib")
    write_event_files(rows, settings, subject, folder)
    return [*lines, f"TensorBoard: tensorboard --logdir {folder}"]


def title(settings: BenchSettings, subject: Subject) -> str:
    """What was measured, in a line."""
    layout = ", channels last" if settings.channels_last else ""
    inputs = f"inputs {subject.shapes()}"
    return f"{settings.module}, {inputs}, {settings.precision}{layout}, {environment()['device']}"


def write_event_files(rows: Sequence[BenchRow], settings: BenchSettings, subject: Subject, folder: Path) -> None:
    """Write a TensorBoard run for each mode, with the scalars and the report that a trainer run has.

    ``compile-callbacks report FOLDER`` reads the reports.
    """
    from torch.utils.tensorboard import SummaryWriter

    from compile_callbacks.reporting import tensorboard

    asked = {"module": settings.module, "inputs": subject.shapes(), "precision": settings.precision}
    for name in dict.fromkeys(row.name for row in rows):
        of_mode = [row for row in rows if row.name == name]
        phases: dict[str, Any] = {row.phase: row.report for row in of_mode}
        report = CompileReport(**phases)
        # What an earlier run has written there is no longer shown.
        with SummaryWriter(str(folder / name), purge_step=0) as writer:
            if name != EAGER:
                tensorboard.add_hparams(writer, asked, report, step=0)
                tensorboard.add_layout(writer)
                for tag, value in report.scalars().items():
                    writer.add_scalar(tag, value, 0)
            for row in of_mode:
                for block, milliseconds in enumerate(row.block_ms):
                    writer.add_scalar(f"bench/{row.phase}/step_ms", milliseconds, block)
            if name != EAGER:
                tensorboard.add_report(writer, report, 0)
