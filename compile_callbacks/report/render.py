"""Renders reports as plain text, and prints tables; rich lays them out."""

from __future__ import annotations

import io
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.profiling.events import EVENT_KINDS
from compile_callbacks.report.declaration import NOTHING, Group
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.sentences import next_step, notes, verdict_lines

_UNLIMITED = 10_000  # characters in a line
_PLAIN_TEXT_WIDTH = 120
_CELL_WIDTH = 60
_RESULTS = {"differs": "Differs from eager", "equal": "Partly compared", "not compared": "Not compared with eager"}
_ZEROS = ("graph_breaks", "recompiles", "fallbacks")  # the counts that one line names if they are zero


# ------------------------------------------------------------------------------------------ the tables of a report


def _main_table(phases: Mapping[Phase, PhaseReport]) -> list[tuple[str, ...]]:
    """Return the rows of the main table: a title for each group, and the figures that a phase has."""
    groups: dict[str, list[tuple[str, ...]]] = {group: [] for group in get_args(Group)}
    for of_phases in zip(*(report.cells() for report in phases.values()), strict=True):
        group, label, _ = of_phases[0]
        groups[group].append((f"  {label}", *(text for *_, text in of_phases)))
    trials = [{trial["candidate"]: _trial(trial) for trial in r.diagnostics.trials} for r in phases.values()]
    for name in dict.fromkeys(name for of_phase in trials for name in of_phase):
        groups["speed"].append((f"  candidate {name}", *(of_phase.get(name, NOTHING) for of_phase in trials)))
    kept = {group: [row for row in rows if set(row[1:]) != {NOTHING}] for group, rows in groups.items()}
    return [row for group, rows in kept.items() if rows for row in [(group, *("" for _ in phases)), *rows]]


def _trial(trial: Mapping[str, Any]) -> str:
    """Return the median and the verdict of a candidate: ``4.77 ms, chosen``."""
    return ("" if trial["median_ms"] is None else f"{trial['median_ms']:.2f} ms, ") + str(trial["verdict"])


def details_to_text(phases: Mapping[Phase, PhaseReport]) -> str:
    """Return a line for each different event with a reason, by kind, and for each run of a graph pass."""
    titles = {kind: info.title for kind, info in EVENT_KINDS.items()} | _RESULTS
    lines: dict[str, Counter[str]] = {kind: Counter() for kind in titles}
    for phase, report in phases.items():
        for event in report.diagnostics.events:
            kind = event.get("verdict") or event["kind"]  # only the kind "verify" has a verdict
            if event.get("reason") and kind in lines:  # a newer version of this library may know other kinds
                where = f" ({event['file']}:{event.get('line', '?')})" if event.get("file") else ""
                reason = "; ".join(filter(None, (event["reason"], event.get("fix"))))
                lines[kind][f"{phase}: {event['target']}{where}: {' '.join(reason.split())}"] += 1
    passes = [f"{phase}: {_pass_run(run)}" for phase, report in phases.items() for run in report.diagnostics.passes]
    parts = [(titles[kind], counts) for kind, counts in lines.items()] + [("Graph passes", Counter(passes))]
    return "\n\n".join(
        "\n".join([title, *(f"  {line}" + f" ({times} times)" * (times > 1) for line, times in counts.items())])
        for title, counts in parts
        if counts
    )


def _pass_run(run: Mapping[str, Any]) -> str:
    about = f"{run['name']} ({run['hook']}, {run['target']})"
    if run.get("from_cache"):
        return f"{about} did not run: torch's cache has the graph with the pass applied"
    after = f"changed {run['nodes_before']} nodes to {run['nodes_after']}" if run["changed"] else "changed nothing"
    return f"{about} {after} in the {run['graph']} graph, in {run['seconds'] * 1000:.1f} ms"


# ------------------------------------------------------------------------------------------ plain text


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, numbers: bool = False) -> str:
    """Render a table as plain text without trailing spaces. With ``numbers``, all columns but the first are aligned."""
    from rich.box import Box  # imported here, because a process that prints no table does not need rich
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    line, file = "    \n", io.StringIO()
    rule_below_the_head = Box(line * 2 + " -- \n" + line * 5, ascii=True)
    table = Table(box=rule_below_the_head, show_edge=False, pad_edge=False)
    for index, name in enumerate(head):
        justify: Any = "right" if numbers and index > 0 else "left"
        table.add_column(Text(name), justify=justify, max_width=_CELL_WIDTH if numbers else None, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_texts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts, and wrap them at the width of the terminal."""
    sys.stdout.write(_table(head, rows, _width(_PLAIN_TEXT_WIDTH)) + "\n")


def _width(plain_width: int) -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else plain_width


def to_plain_text(phases: Mapping[Phase, PhaseReport], width: int = _UNLIMITED) -> str:
    """Render a report as plain text: the verdicts, the table, and the lines below the table."""
    shown = {p: r for p, r in phases.items() if r.mode != EAGER or r.graphs or r.diagnostics.trials} or phases
    lines = [*verdict_lines(phases), "", _table(("", *shown), _main_table(shown), width, numbers=True)]
    zeros = [name.replace("_", " ") for name in _ZEROS if not any(getattr(report, name) for report in shown.values())]
    if zeros and any(report.compile_seconds is not None for report in shown.values()):
        lines.append(f"no {' or '.join(', '.join(zeros).rsplit(', ', 1))}")
    lines += notes(phases)
    return "\n".join([*lines, f"next: {todo}"] if (todo := next_step(phases)) else lines)


def print_report(phases: Mapping[Phase, PhaseReport], *, details: bool = False) -> None:
    """Print a report, and the tables with its ``details``."""
    sys.stdout.write(f"\ntorch.compile report\n{to_plain_text(phases, _width(_UNLIMITED))}\n\n")
    if details and (text := details_to_text(phases)):
        sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()
