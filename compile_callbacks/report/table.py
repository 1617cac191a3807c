"""Converts a report to rows of tables and to Markdown, for the terminal, loggers and the command line."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.report.data import PhaseDiagnostics, PhaseReport, RunReport
from compile_callbacks.report.summary import next_step, notes, verdict_lines

_NOTHING = "-"
_MAX_NAMES = 4
_SPECIAL = re.compile(r"([\\`*_\[\]|#])")


class Group(NamedTuple):
    """A group of rows of the main table. Each row has a label, and a cell for each report."""

    title: str
    rows: list[tuple[str, ...]]


def main_table(reports: Sequence[PhaseReport]) -> list[Group]:
    """Return the groups of the main table, without rows that have no figure in any report."""
    groups = [
        Group("speed", [*_rows(_SPEED, reports), *_candidates(reports)]),
        Group("compile", _rows(_COMPILE, reports)),
        Group("correctness", _rows(_CORRECTNESS, reports)),
    ]
    return [group for group in groups if group.rows]


def zeros_line(reports: Sequence[PhaseReport]) -> str:
    """Return a line with the counts that are zero in all reports: ``no graph breaks, recompiles or fallbacks``."""
    names = ("graph_breaks", "recompiles", "fallbacks")
    zeros = [name.replace("_", " ") for name in names if not any(getattr(report, name) for report in reports)]
    compiled = any(report.compile_seconds is not None for report in reports)
    return f"no {' or '.join(', '.join(zeros).rsplit(', ', 1))}" if zeros and compiled else ""


def _rows(rows: Sequence[_Row], reports: Sequence[PhaseReport]) -> list[tuple[str, ...]]:
    cells = [(label, *(show(report) for report in reports)) for label, show in rows]
    return [row for row in cells if any(cell != _NOTHING for cell in row[1:])]


def _candidates(reports: Sequence[PhaseReport]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(trial["candidate"] for report in reports for trial in report.diagnostics.trials)
    return [(f"candidate {name}", *(_trial(report, name) for report in reports)) for name in names]


class Section(NamedTuple):
    """A table with details of a report."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def sections(report: RunReport) -> list[Section]:
    """Return tables of the reasons for the counts, of graph passes and of candidates. Omit empty tables."""
    reasons: dict[str, Counter[tuple[str, ...]]] = {kind: Counter() for kind in _TITLES}
    for phase in PHASES:
        for event in report.phase(phase).diagnostics.events:
            if reason := event.get("reason"):
                where = f"{event['file']}:{event.get('line', '?')}" if event.get("file") else _NOTHING
                row = phase, event["target"], where, f"{reason}; {event['fix']}" if event.get("fix") else reason
                kind = event.get("verdict") or event["kind"]  # only the kind "verify" has a verdict
                reasons.setdefault(kind, Counter())[row] += 1
    found = [
        Section(
            _TITLES.get(kind, kind.replace("_", " ").capitalize()),
            ("phase", "target", "times", "where", "reason"),
            [(phase, target, str(times), *rest) for (phase, target, *rest), times in counts.items()],
        )
        for kind, counts in reasons.items()
    ]
    passes = [_pass_row(phase, run) for phase in PHASES for run in report.phase(phase).diagnostics.passes]
    found.append(Section("Graph passes", ("phase", "target", "pass", "hook point", "graph", "nodes", "ms"), passes))
    trials = [_trial_row(phase, trial) for phase in PHASES for trial in report.phase(phase).diagnostics.trials]
    head = ("phase", "candidate", "median ms", "95% ms", "samples", "compile s", "verdict", "reason")
    found.append(Section("Candidates", head, trials))
    return [section for section in found if section.rows]


_TITLES = {
    "graph_break": "Graph breaks",
    "recompile": "Recompiles",
    "fallback": "Fallbacks to eager",
    "cudagraph_skip": "CUDA graphs not used",
    "pass_skipped": "Graph passes skipped",
    "freezing": "Weights not frozen",
    "template": "Templates that fell back",
    "whole_target": "Repeated blocks compiled with the whole target",
    "cache": "Not loaded from torch's cache",
    "differs": "Differs from eager",
    "not compared": "Not compared with eager",
}


def _pass_row(phase: Phase, run: Mapping[str, Any]) -> tuple[str, ...]:
    if run.get("from_cache"):
        graph, nodes, ms = _NOTHING, "did not run: torch's cache has the graph with the pass applied", _NOTHING
    else:
        counts = f"{run['nodes_before']} to {run['nodes_after']}"
        graph, ms = run["graph"], f"{run['seconds'] * 1000:.1f}"
        nodes = counts if run["changed"] else f"{run['nodes_before']}, changed nothing"
    return phase, run["target"], run["name"], run["hook"], graph, nodes, ms


def _trial_row(phase: Phase, trial: Mapping[str, Any]) -> tuple[str, ...]:
    forms = {"median_ms": ".2f", "p95_ms": ".2f", "samples": "d", "compile_seconds": ".1f"}
    cells = [_number(trial[name], form) for name, form in forms.items()]
    return phase, trial["candidate"], *cells, trial["verdict"], trial["reason"] or _NOTHING


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _number(value: float | None, form: str) -> str:
    if value is None:
        return _NOTHING
    text = format(value, form)
    return text if float(text) else text.lstrip("-")


def _peak(diagnostics: PhaseDiagnostics, prefix: str) -> str:
    mib, at_most_mib = (getattr(diagnostics, f"{prefix}peak_memory_{end}") for end in ("mib", "at_most_mib"))
    return _number(mib, ".0f") if at_most_mib is None else f"at most {at_most_mib:.0f}"


def _step(median: float | None, spread: float | None) -> str:
    return _number(median, ".2f") + ("" if spread is None else f" ± {spread / 2:.2f}")


def _samples(report: PhaseReport) -> str:
    eager, compiled = report.diagnostics.eager_samples, report.diagnostics.compiled_samples
    if eager is None or compiled is None:  # a file of an older version contains only the smaller number
        return _number(report.samples, "d")
    return f"{eager} / {compiled}"


def _cache(report: PhaseReport) -> str:
    hits, misses = report.cache_hits, report.diagnostics.cache_misses
    return f"{hits} / {misses}" if hits or misses else _NOTHING


def _trial(report: PhaseReport, candidate: str) -> str:
    """Return the median and the verdict of a candidate: ``4.77 ms, chosen``."""
    found = next((trial for trial in report.diagnostics.trials if trial["candidate"] == candidate), None)
    if found is None:
        return _NOTHING
    return ("" if found["median_ms"] is None else f"{found['median_ms']:.2f} ms, ") + str(found["verdict"])


_Row = tuple[str, Callable[["PhaseReport"], str]]

_SPEED: tuple[_Row, ...] = (
    ("eager step ms", lambda p: _step(p.eager_step_ms, p.diagnostics.eager_spread_ms)),
    ("compiled step ms", lambda p: _step(p.compiled_step_ms, p.diagnostics.compiled_spread_ms)),
    ("samples, eager / compiled", _samples),
    ("speedup", lambda p: _NOTHING if p.speedup is None else f"{p.speedup:.2f}x"),
    ("net seconds saved", lambda p: _number(p.net_seconds_saved, ".1f")),
    ("break-even steps", lambda p: "never" if p.break_even_steps == math.inf else _number(p.break_even_steps, ".0f")),
    ("eager peak memory MiB", lambda p: _peak(p.diagnostics, "eager_")),
    ("compiled peak memory MiB", lambda p: _peak(p.diagnostics, "")),
    ("saved for backward MiB", lambda p: _number(round(p.diagnostics.saved_for_backward_mib or 0, 1) or None, ".1f")),
)
_COMPILE: tuple[_Row, ...] = (
    ("mode", lambda p: p.mode),
    ("targets", lambda p: _listed(p.targets) or _NOTHING),
    ("compile seconds", lambda p: _number(p.compile_seconds, ".1f")),
    ("graphs", lambda p: str(p.graphs or _NOTHING)),
    ("graph breaks", lambda p: str(p.graph_breaks or _NOTHING)),
    ("recompiles", lambda p: str(p.recompiles or _NOTHING)),
    ("fallbacks", lambda p: str(p.fallbacks or _NOTHING)),
    ("cache hits / misses", _cache),
    ("skipped passes", lambda p: str(p.diagnostics.skipped_passes or _NOTHING)),
)
_CORRECTNESS: tuple[_Row, ...] = (
    ("compared with eager", lambda p: p.verified or _NOTHING),
    ("max abs error", lambda p: _number(p.diagnostics.max_abs_error, ".1e")),
)


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
