"""Converts a report to rows of tables and to Markdown, for the terminal, loggers and the command line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from compile_callbacks._utils.phases import PHASES
from compile_callbacks.profiling.events import EVENT_KINDS
from compile_callbacks.report.data import PhaseReport, RunReport
from compile_callbacks.report.figures import GROUPS, NOTHING, cell
from compile_callbacks.report.summary import next_step, notes, verdict_lines

_RESULTS = {"differs": "Differs from eager", "equal": "Partly compared", "not compared": "Not compared with eager"}
_TRIAL_FORMS = {"median_ms": "{:.2f}", "p95_ms": "{:.2f}", "samples": "{}", "compile_seconds": "{:.1f}"}
_SPECIAL = re.compile(r"([\\`*_\[\]|#])")


class Section(NamedTuple):
    """A table with details of a report, or a group of rows of the main table."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def main_table(reports: Sequence[PhaseReport]) -> list[Section]:
    """Return the groups of the main table, with a cell for each report. Omit rows that have no figure in any report."""
    groups = {group: Section(group, (), []) for group in GROUPS}
    for row in zip(*(report.cells() for report in reports), strict=True):
        group, label, _ = row[0]
        groups[group].rows.append((label, *(text for *_, text in row)))
    names = dict.fromkeys(trial["candidate"] for report in reports for trial in report.diagnostics.trials)
    groups["speed"].rows.extend((f"candidate {name}", *(_trial(report, name) for report in reports)) for name in names)
    kept = [group._replace(rows=[row for row in group.rows if set(row[1:]) != {NOTHING}]) for group in groups.values()]
    return [group for group in kept if group.rows]


def _trial(report: PhaseReport, candidate: str) -> str:
    """Return the median and the verdict of a candidate: ``4.77 ms, chosen``."""
    for trial in report.diagnostics.trials:
        if trial["candidate"] == candidate:
            return ("" if trial["median_ms"] is None else f"{trial['median_ms']:.2f} ms, ") + str(trial["verdict"])
    return NOTHING


def zeros_line(reports: Sequence[PhaseReport]) -> str:
    """Return a line with the counts that are zero in all reports: ``no graph breaks, recompiles or fallbacks``."""
    counts = {name: figure.label(name) for name, figure in PhaseReport.declared().items() if figure.zero}
    zeros = [label for name, label in counts.items() if not any(getattr(report, name) for report in reports)]
    compiled = any(report.compile_seconds is not None for report in reports)
    return f"no {' or '.join(', '.join(zeros).rsplit(', ', 1))}" if zeros and compiled else ""


def sections(report: RunReport) -> list[Section]:
    """Return tables of the reasons for the counts, of graph passes and of candidates. Omit empty tables."""
    titles = {kind: info.title for kind, info in EVENT_KINDS.items()} | _RESULTS
    reasons: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in titles}
    passes, trials = [], []
    for phase in PHASES:
        diagnostics = report.phase(phase).diagnostics
        for event in diagnostics.events:
            if reason := event.get("reason"):
                where = f"{event['file']}:{event.get('line', '?')}" if event.get("file") else NOTHING
                row = phase, event["target"], where, f"{reason}; {event['fix']}" if event.get("fix") else reason
                kind = event.get("verdict") or event["kind"]  # only the kind "verify" has a verdict
                if kind in reasons:  # a newer version of this library may know other kinds
                    reasons[kind][row] += 1
        passes += [(phase, *_pass_row(run)) for run in diagnostics.passes]
        for trial in diagnostics.trials:
            figures = [cell(trial[name], form) for name, form in _TRIAL_FORMS.items()]
            trials.append((phase, trial["candidate"], *figures, trial["verdict"], trial["reason"] or NOTHING))
    tables = [
        Section(
            titles[kind],
            ("phase", "target", "times", "where", "reason"),
            [(phase, target, str(times), *rest) for (phase, target, *rest), times in counts.items()],
        )
        for kind, counts in reasons.items()
    ]
    tables.append(Section("Graph passes", ("phase", "target", "pass", "hook point", "graph", "nodes", "ms"), passes))
    head = ("phase", "candidate", "median ms", "95% ms", "samples", "compile s", "verdict", "reason")
    return [table for table in (*tables, Section("Candidates", head, trials)) if table.rows]


def _pass_row(run: Mapping[str, Any]) -> tuple[str, ...]:
    if run.get("from_cache"):
        graph, nodes, ms = NOTHING, "did not run: torch's cache has the graph with the pass applied", NOTHING
    else:
        counts = f"{run['nodes_before']} to {run['nodes_after']}"
        graph, ms = run["graph"], f"{run['seconds'] * 1000:.1f}"
        nodes = counts if run["changed"] else f"{run['nodes_before']}, changed nothing"
    return run["target"], run["name"], run["hook"], graph, nodes, ms


def to_markdown(report: RunReport, environment: Mapping[str, str]) -> str:
    """Render a report as Markdown: the verdict, the next step, the reasons for the counts, and the figures."""
    phases, todo = report.compiled_phases, next_step(report)
    reports = [report.phase(phase) for phase in phases]
    empty = [""] * len(phases)
    rows = [row for group in main_table(reports) for row in ((group.title.upper(), *empty), *group.rows)]
    parts = [
        "## Compile report",
        *(f"**{_escaped(line)}**" for line in verdict_lines(report)),
        *([f"Next: {_escaped(todo)}"] if todo else []),
        *(f"### {section.title}\n\n{_markdown_table(section.head, section.rows)}" for section in sections(report)),
        "### Figures",
        _markdown_table(("", *phases), rows),
        *map(_escaped, filter(None, [zeros_line(reports), *notes(report)])),
        "### Environment",
        _markdown_table(("", "version or name"), environment.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *(tuple(map(_escaped, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Escape line ends, pipes and underscores for a table cell, because torch's reasons contain them."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    escaped = (_SPECIAL.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;")) for line in lines if line)
    return "<br>".join(escaped)
