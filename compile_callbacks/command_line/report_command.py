"""``compile-callbacks report``: the tables of runs that are over, from their event files."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compile_callbacks.links import see
from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.reporting.reasons import Reason, reasons
from compile_callbacks.reporting.table import labels_and_cells, plain_table

if TYPE_CHECKING:
    from compile_callbacks.reporting.run_reports import Run

_DESCRIPTION = """\
Print what compiling cost and gained in runs that InductorCompile measured and a TensorBoardLogger logged. Runs are
found in the folders named and in those below them.
"""

_INCOMPLETE = "the run is not over, or was killed: only the scalars that it logged are known"
_WIDEST = 28  # characters of a column where runs stand side by side


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "report", help="print the report of a run from its event files", description=_DESCRIPTION
    )
    parser.add_argument("logdir", nargs="+", type=Path, metavar="LOGDIR", help="a TensorBoard log folder")
    parser.add_argument("--compare", action="store_true", help="runs side by side, a column for each run and phase")
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    parser.set_defaults(command=report)


def report(args: argparse.Namespace) -> int:
    """Print the reports.

    Returns:
        The exit status: 2 where a folder has no report or an event file is broken. What can be read is printed.
    """
    errors: list[str] = []
    runs = [run for logdir in args.logdir for run in _runs(logdir, errors)]
    if args.json:
        sys.stdout.write(json.dumps([_as_data(run) for run in runs], indent=2) + "\n")
    elif runs and args.compare:
        # As TensorBoard names runs, where they are of one folder.
        top = args.logdir[0] if len(args.logdir) == 1 and runs[0].path != args.logdir[0] else Path()
        sys.stdout.write(_side_by_side(runs, top) + "\n")
    else:
        sys.stdout.write("\n\n".join(map(_in_full, runs)) + ("\n" if runs else ""))
    sys.stdout.flush()  # before what goes to stderr
    sys.stderr.writelines(f"compile-callbacks report: {error}\n" for error in errors)
    return 2 if errors else 0


def _runs(logdir: Path, errors: list[str]) -> list[Run]:
    # Imported here: they need TensorBoard, without which the other commands run.
    from compile_callbacks.reporting.eventfiles import BrokenEventFileError, folders_with_event_files
    from compile_callbacks.reporting.run_reports import find_runs

    if not logdir.is_dir():
        errors.append(f"{logdir} is not a folder" if logdir.exists() else f"{logdir} does not exist")
        return []
    broken: list[BrokenEventFileError] = []
    runs = find_runs(logdir, broken)
    errors.extend(see(str(error), "an-event-file-is-damaged") for error in broken)
    if not runs and not broken:
        has_files = next(folders_with_event_files(logdir), None)
        what = "event files without a compile report" if has_files else "no event files"
        errors.append(f"{logdir} has {what}; runs with InductorCompile and a TensorBoardLogger leave one")
    return runs


def _in_full(run: Run) -> str:
    lines = [str(run.path), "", str(run.report), ""]
    lines += [_in_a_line(reason, times) for reason, times in reasons(run.report).items()]
    if not run.complete:
        lines.append(_INCOMPLETE)
    if run.environment:
        lines.append(", ".join(f"{name} {value}" for name, value in run.environment.items()))
    return "\n".join(lines).rstrip()


def _in_a_line(reason: Reason, times: int) -> str:
    what = reason.kind.replace("_", " ") + (f" ({times} times)" if times > 1 else "")
    where = f" at {reason.where}" if reason.where else ""
    return f"{what} in {reason.target}, {reason.phase}{where}: {reason.text.splitlines()[0]}"


def _side_by_side(runs: Sequence[Run], top: Path) -> str:
    columns: list[tuple[Run, Phase]] = [
        (run, phase) for run in runs for phase in PHASES if run.report.phase(phase).mode != "eager"
    ]
    heads = [("", *(_end_of(run.path, top) for run, _ in columns)), ("", *(phase for _, phase in columns))]
    table = plain_table(heads, labels_and_cells([run.report.phase(p) for run, p in columns]), widest=_WIDEST)
    notes = [f"{_end_of(run.path, top)}: {_INCOMPLETE}" for run in runs if not run.complete]
    return "\n".join([table, *([""] if notes else []), *notes])


def _end_of(path: Path, top: Path) -> str:
    """The end of a path below ``top``: it tells runs apart where the beginning does not."""
    name = str(path.relative_to(top) if path.is_relative_to(top) else path)
    return name if len(name) <= _WIDEST else "…" + name[1 - _WIDEST :]


def _as_data(run: Run) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "complete": run.complete,
        **run.report.to_dict(),
        "environment": dict(run.environment),
    }
