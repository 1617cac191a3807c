"""Print what compiling cost and gained, from the compile_report.json files of runs.

InductorCompile writes the file into the folder of a logger at the end of each trainer call, and CompileReport.save
writes one. PATH is such a file, or a folder, which is searched recursively.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile_callbacks.report.file import FILE_NAME, VERSION, read_records
from compile_callbacks.report.render import details_to_text, print_report
from compile_callbacks.report.report import CompileReport

ARGUMENTS: dict[str, dict[str, Any]] = {
    "path": {"nargs": "+", "type": Path, "metavar": "PATH", "help": f"a log directory, or a file such as {FILE_NAME}"},
    "--json": {"action": "store_true", "dest": "as_json", "help": "print the records as JSON"},
}


def run(path: list[Path], as_json: bool) -> int:
    """Print all records before a damaged one. Return status 2 if a path has no report, or if a file is damaged."""
    errors: list[str] = []
    calls = [call for each in path for call in _read_calls(each, errors)]
    if as_json:
        sys.stdout.write(json.dumps([{"file": str(file), **record} for file, record, _ in calls], indent=2) + "\n")
    else:
        for call in calls:
            _print_call(*call)
    sys.stdout.flush()
    sys.stderr.writelines(f"compile-callbacks report: {error}\n" for error in errors)
    return 2 if errors else 0


def _read_calls(path: Path, errors: list[str]) -> Iterator[tuple[Path, dict[str, Any], CompileReport]]:
    """Yield file, record and report of each trainer call. Add a line to ``errors`` for each damaged file."""
    files = sorted(path.rglob(FILE_NAME)) if path.is_dir() else [path]
    if not files:
        errors.append(f"{path} contains no {FILE_NAME}; a run with InductorCompile and a logger writes one at its end")
    for file in files:
        try:
            for record in read_records(file.read_bytes()):
                if record["version"] != VERSION or not isinstance(record["report"], dict):
                    raise ValueError(f"not a record of version {VERSION}")
                report = CompileReport.from_dict(record["report"])
                str(report), details_to_text(report.phases)  # raises if the report cannot be printed
                yield file, record, report
        except Exception as error:  # a damaged record raises errors of many types
            errors.append(f"{file} cannot be read: {type(error).__name__}: {error}")


def _print_call(file: Path, record: dict[str, Any], report: CompileReport) -> None:
    values = {name: record.get(name) for name in ("call", "time", "global_step")}
    head = [str(file), *(f"{name} {value}" for name, value in values.items() if value is not None)]
    head += [f"ended by {record['exception']}"] if record.get("exception") else []
    sys.stdout.write(", ".join(head) + "\n")
    print_report(report.phases, details=True)
    if isinstance(environment := record.get("environment"), dict):
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in environment.items()) + "\n\n")
