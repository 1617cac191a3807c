"""The reasons behind a report's counts, each named once."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.reporting.report import CompileReport


class Reason(NamedTuple):
    """Why something happened while compiling.

    Attributes:
        kind: What happened, as in `CompileEvent`.
        phase: The phase it was compiled for.
        target: Name of the target.
        where: The user's file and line, or ``None``.
        text: Torch's reason, one or more lines.
    """

    kind: str
    phase: Phase
    target: str
    where: str | None
    text: str


def reasons(report: CompileReport) -> dict[Reason, int]:
    """Each reason in a report and how many times it is there, in the order in which they came."""
    found: Counter[Reason] = Counter()
    for phase in PHASES:
        for event in report.phase(phase).events:
            if text := event.get("reason"):
                where = f"{event['file']}:{event.get('line', '?')}" if event.get("file") else None
                found[Reason(event["kind"], phase, event["target"], where, text)] += 1
    return dict(found)
