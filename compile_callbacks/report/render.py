"""Renders reports as plain text, and prints tables; rich lays them out."""

from __future__ import annotations

import io
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from compile_callbacks._utils.phases import EAGER, Phase
from compile_callbacks.profiling.events import EVENT_KINDS
from compile_callbacks.report.declaration import NOTHING, Group, cell
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.sentences import next_step, notes, verdict_lines

if TYPE_CHECKING:
    from rich.table import Table

_UNLIMITED = 10_000  # characters in a line
_PLAIN_TEXT_WIDTH = 120
_CELL_WIDTH = 60
_RESULTS = {"differs": "Differs from eager", "equal": "Partly compared", "not compared": "Not compared with eager"}
_TRIAL_FORMS = {"median_ms": "{:.2f}", "p95_ms": "{:.2f}", "samples": "{}", "compile_seconds": "{:.1f}"}
_ZEROS = ("graph_breaks", "recompiles", "fallbacks")  # the counts that one line names if they are zero


class Section(NamedTuple):
    """A table with details of a report."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


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


def _below(phases: Mapping[Phase, PhaseReport]) -> list[str]:
    """Return the lines below the main table, first ``no graph breaks, recompiles or fallbacks``."""
    shown = _shown(phases).values()
    zeros = [name.replace("_", " ") for name in _ZEROS if not any(getattr(report, name) for report in shown)]
    if not zeros or all(report.compile_seconds is None for report in shown):
        return notes(phases)
    return [f"no {' or '.join(', '.join(zeros).rsplit(', ', 1))}", *notes(phases)]


def _shown(phases: Mapping[Phase, PhaseReport]) -> Mapping[Phase, PhaseReport]:
    """Return the phases that have figures, or both phases if neither has."""
    return {p: r for p, r in phases.items() if r.mode != EAGER or r.diagnostics.trials} or phases


def sections(phases: Mapping[Phase, PhaseReport]) -> list[Section]:
    """Return tables of the reasons for the counts, of graph passes and of candidates. Omit empty tables."""
    titles = {kind: info.title for kind, info in EVENT_KINDS.items()} | _RESULTS
    reasons: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in titles}
    passes, trials = [], []
    for phase, report in phases.items():
        for event in report.diagnostics.events:
            kind = event.get("verdict") or event["kind"]  # only the kind "verify" has a verdict
            if event.get("reason") and kind in reasons:  # a newer version of this library may know other kinds
                where = f"{event['file']}:{event.get('line', '?')}" if event.get("file") else NOTHING
                reason = "; ".join(filter(None, (event["reason"], event.get("fix"))))
                reasons[kind][phase, event["target"], where, reason] += 1
        passes += [(phase, *_pass_row(run)) for run in report.diagnostics.passes]
        for trial in report.diagnostics.trials:
            figures = [cell(trial[name], form) for name, form in _TRIAL_FORMS.items()]
            trials.append((phase, trial["candidate"], *figures, trial["verdict"], trial["reason"] or NOTHING))
    columns = ("phase", "target", "times", "where", "reason")
    tables = [
        Section(titles[kind], columns, [(*row[:2], str(times), *row[2:]) for row, times in counts.items()])
        for kind, counts in reasons.items()
    ]
    tables.append(Section("Graph passes", ("phase", "target", "pass", "hook point", "graph", "nodes", "ms"), passes))
    head = ("phase", "candidate", "median ms", "95% ms", "samples", "compile s", "verdict", "reason")
    return [table for table in (*tables, Section("Candidates", head, trials)) if table.rows]


def _pass_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    graph, nodes, ms = NOTHING, "did not run: torch's cache has the graph with the pass applied", NOTHING
    if not run.get("from_cache"):
        after = f" to {run['nodes_after']}" if run["changed"] else ", changed nothing"
        graph, nodes, ms = run["graph"], f"{run['nodes_before']}{after}", f"{run['seconds'] * 1000:.1f}"
    return run["target"], run["name"], run["hook"], graph, nodes, ms


# ------------------------------------------------------------------------------------------ plain text


def make_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    title: str = "",
    *,
    numbers: bool = True,
    width: int = _CELL_WIDTH,
) -> Table:
    """Make a rich table. With ``numbers``, all columns but the first are right-aligned."""
    from rich.box import Box  # imported here, because a process that prints no table does not need rich
    from rich.table import Table
    from rich.text import Text

    line = "    \n"
    rule_below_the_head = Box(line * 2 + " -- \n" + line * 5, ascii=True)
    heading = Text(title) if title else None
    table = Table(title=heading, title_justify="left", box=rule_below_the_head, show_edge=False, pad_edge=False)
    for index, name in enumerate(head):
        justify: Any = "right" if numbers and index > 0 else "left"
        table.add_column(Text(name), justify=justify, max_width=width if numbers else None, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def to_text(table: Table, width: int = _UNLIMITED) -> str:
    """Render a table as plain text, without colors and trailing spaces."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def print_texts(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts, and wrap them at the width of the terminal."""
    sys.stdout.write(to_text(make_table(head, rows, numbers=False), _width(_PLAIN_TEXT_WIDTH)) + "\n")


def _width(plain_width: int) -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else plain_width


def to_plain_text(phases: Mapping[Phase, PhaseReport], width: int = _UNLIMITED) -> str:
    """Render a report as plain text: the verdicts, the table, and the lines below the table."""
    todo, shown = next_step(phases), _shown(phases)
    table = to_text(make_table(("", *shown), _main_table(shown)), width)
    return "\n".join([*verdict_lines(phases), "", table, *_below(phases), *([f"next: {todo}"] if todo else [])])


def details_to_text(phases: Mapping[Phase, PhaseReport], width: int = _PLAIN_TEXT_WIDTH) -> str:
    """Render the tables with the details of a report as plain text."""
    tables = (make_table(section.head, section.rows, section.title, numbers=False) for section in sections(phases))
    return "\n\n".join(to_text(table, width) for table in tables)


def print_report(phases: Mapping[Phase, PhaseReport], *, details: bool = False) -> None:
    """Print a report, and the tables with its ``details``."""
    sys.stdout.write(f"\ntorch.compile report\n{to_plain_text(phases, _width(_UNLIMITED))}\n\n")
    if details and (text := details_to_text(phases, _width(_PLAIN_TEXT_WIDTH))):
        sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()
