"""The reports of runs that are over, from their event files alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from compile_callbacks.phases import PHASES
from compile_callbacks.reporting.eventfiles import (
    BrokenEventFileError,
    event_files,
    folders_with_event_files,
    read_values,
)
from compile_callbacks.reporting.report import CompileReport, PhaseReport
from compile_callbacks.reporting.tensorboard import DATA_TAG

_SCALAR = re.compile(r"(?:.*-)?(compile|step)/(train|infer)/(\w+)")  # a logger's prefix may stand before ours
_MARKS = [
    *(f"{group}/{phase}/".encode() for group in ("compile", "step") for phase in PHASES),
    DATA_TAG.encode(),
    SESSION_START_INFO_TAG.encode(),
]
_FIELDS = {f.name: f for f in fields(PhaseReport)}


@dataclass(frozen=True)
class Run:
    """One run of a trainer, as its event files tell of it.

    Attributes:
        path: The folder.
        report: What was measured, so far as that was logged.
        environment: Versions and device by name.
        complete: Whether the report is that of a run's end. Of a run that goes on, or was killed, there are the
            scalars that it logged, and counts that are not among them are 0.
    """

    path: Path
    report: CompileReport
    environment: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True


def find_runs(top: Path, broken: list[BrokenEventFileError]) -> list[Run]:
    """The runs in ``top`` and below it that have a report.

    Args:
        top: A folder.
        broken: Gets the errors of event files that cannot be read to their end; what comes before that is used.
    """
    found = (_read_run(folder, broken) for folder in folders_with_event_files(top))
    return [run for run in found if run is not None]


def _read_run(folder: Path, broken: list[BrokenEventFileError]) -> Run | None:
    report: dict[str, Any] = {phase: {} for phase in PHASES}
    environment: dict[str, str] = {}
    settings: dict[str, str] = {}
    complete = False
    for value in _values(folder, broken):
        if value.tag == DATA_TAG:
            data = json.loads(value.tensor.string_val[0])
            report, environment, complete = data["report"], data["environment"], True
        elif value.tag == SESSION_START_INFO_TAG:
            settings = settings or _settings(value)
        elif (match := _SCALAR.fullmatch(value.tag)) and (name := _field_name(match[1], match[3])):
            # What was logged after a report is of a later run in the same folder, and newer.
            is_count = isinstance(_FIELDS[name].default, int)
            report[match[2]][name] = round(value.simple_value) if is_count else value.simple_value
    if not any(report[phase] for phase in PHASES):
        return None
    if not complete:
        for phase in PHASES:
            report[phase] = _asked_for(phase, settings) | report[phase] if report[phase] else {}
    return Run(folder, CompileReport.from_dict(report), environment, complete)


def _values(folder: Path, broken: list[BrokenEventFileError]) -> Iterator[Summary.Value]:
    for path in event_files(folder):
        try:
            yield from read_values(path, _MARKS)
        except BrokenEventFileError as error:
            broken.append(error)


def _settings(value: Summary.Value) -> dict[str, str]:
    """Modes and targets of an HPARAMS entry: all that says of them while a run is not over."""
    entry = HParamsPluginData.FromString(value.metadata.plugin_data.content).session_start_info.hparams
    return {name: entry[name].string_value for name in entry if name.startswith("compile/")}


def _asked_for(phase: str, settings: Mapping[str, str]) -> dict[str, Any]:
    targets = settings.get("compile/targets", "auto")
    return {
        "mode": settings.get(f"compile/{phase}_mode", "unknown"),
        "targets": [] if targets == "auto" else targets.split(", "),
    }


def _field_name(group: str, scalar: str) -> str | None:
    """The field of `PhaseReport` that a scalar was logged from."""
    for name in (scalar, f"{group}_{scalar}", scalar.replace("_ms", "_step_ms")):
        if name in _FIELDS:
            return name
    return None
