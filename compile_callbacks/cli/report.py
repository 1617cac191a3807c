"""``compile-callbacks report``: prints the reports that runs have written into their log directories."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from compile_callbacks.report.file import FILE_NAME, VERSION, read_records
from compile_callbacks.report.render import details_to_text, print_report
from compile_callbacks.report.report import CompileReport

_DESCRIPTION = f"""\
Print what compiling cost and gained, from the {FILE_NAME} files that InductorCompile writes into the folder of a logger
at the end of each trainer call, and from files of CompileReport.save. PATH is such a file or a folder. Folders are
searched recursively.
"""


class _Call(NamedTuple):
    """A trainer call, read from one record of a file."""

    path: Path
    record: dict[str, Any]
    report: CompileReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = _DESCRIPTION
    add = parser.add_argument
    add("path", nargs="+", type=Path, metavar="PATH", help=f"a log directory, or a file such as {FILE_NAME}")
    add("--json", action="store_true", help="print the records as JSON")


def run(args: argparse.Namespace) -> int:
    """Print all readable records. Return status 2 if a path has no report, or if a file or record is damaged."""
    errors: list[str] = []
    calls = [call for path in args.path for call in _read_calls(path, errors)]
    if args.json:
        data = [{"file": str(call.path), **call.record} for call in calls]
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        for call in calls:
            _print_in_full(call)
    sys.stdout.flush()
    sys.stderr.writelines(f"compile-callbacks report: {error}\n" for error in errors)
    return 2 if errors else 0


def _read_calls(path: Path, errors: list[str]) -> list[_Call]:
    """Read the trainer calls in the files of a path. Add a line to ``errors`` for each damaged file or record."""
    if not path.exists():
        errors.append(f"{path} does not exist")
        return []
    files = sorted(path.rglob(FILE_NAME)) if path.is_dir() else [path]
    if not files:
        errors.append(
            f"{path} contains no {FILE_NAME}; a run with InductorCompile and a logger writes one when it ends"
        )
    calls = []
    for file in files:
        try:
            records = read_records(file)
        except (OSError, ValueError) as error:
            errors.append(f"{file} is damaged: {error}")
            continue
        if not records:
            errors.append(f"{file} contains no record")
        for number, record in enumerate(records, 1):
            try:
                call = _Call(file, record, _report_in(record))
                str(call.report), details_to_text(call.report.phases)  # raises if the report cannot be printed
                calls.append(call)
            except Exception as error:
                errors.append(f"{file}, record {number} is damaged: {type(error).__name__}: {error}")
    return calls


def _report_in(record: object) -> CompileReport:
    """Return the report in a record. A figure that is missing or has a wrong type gets its default."""
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ValueError(f"not a record of version {VERSION}")
    if not isinstance(record.get("report"), dict):
        raise ValueError("contains no report")
    return CompileReport.from_dict(record["report"])


def _print_in_full(call: _Call) -> None:
    record = call.record
    values = {name: record.get(name) for name in ("call", "time", "global_step")}
    head = [str(call.path), *(f"{name} {value}" for name, value in values.items() if value is not None)]
    head += [f"ended by {record['exception']}"] if record.get("exception") else []
    sys.stdout.write(", ".join(head) + "\n")
    print_report(call.report.phases, details=True)
    if isinstance(environment := record.get("environment"), dict):
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in environment.items()) + "\n\n")
