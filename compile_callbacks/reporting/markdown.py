"""A `CompileReport` as Markdown: tables of settings and figures, of reasons, and of what it ran on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compile_callbacks.phases import PHASES, Phase
from compile_callbacks.reporting.reasons import Reason, reasons
from compile_callbacks.reporting.report import CompileReport
from compile_callbacks.reporting.table import labels_and_cells

_TITLES = {
    "graph_break": "Graph breaks",
    "recompile": "Recompiles",
    "fallback": "Fallbacks to eager",
    "cudagraph_skip": "CUDA graphs not used",
    "pass_skipped": "Graph passes skipped",
    "fold": "Weights not folded",
    "template": "Templates that fell back",
}
_SPECIAL = re.compile(r"([\\`*_\[\]|#])")


def to_markdown(report: CompileReport, environment: Mapping[str, str]) -> str:
    """Render a report for TensorBoard's text tab, and for loggers that keep text.

    Args:
        report: What was measured.
        environment: Versions and device by name.

    Returns:
        Markdown with tables.
    """
    rows = labels_and_cells([report.phase(phase) for phase in PHASES])
    parts = ["## Compile report", _table(("", *PHASES), rows)]
    if rows := [(phase, line) for phase in PHASES for line in report.phase(phase).advice]:
        parts += ["### Advice", _table(("phase", "advice"), rows)]
    found = reasons(report)
    for kind in dict.fromkeys([*_TITLES, *(reason.kind for reason in found)]):
        if rows := [_reason_row(reason, times) for reason, times in found.items() if reason.kind == kind]:
            parts.append(f"### {_TITLES.get(kind, kind.replace('_', ' ').capitalize())}")
            parts.append(_table(("phase", "target", "times", "where", "reason"), rows))
    if not found:
        parts.append("No graph breaks, recompiles or fallbacks.")
    if rows := [_pass_row(phase, run) for phase in PHASES for run in report.phase(phase).passes]:
        parts += ["### Graph passes", _table(("phase", "target", "pass", "hook point", "graph", "nodes", "ms"), rows)]
    if rows := [_trial_row(phase, trial) for phase in PHASES for trial in report.phase(phase).trials]:
        heads = ("phase", "candidate", "median ms", "95% ms", "samples", "compile s", "verdict", "reason")
        parts += ["### Candidates", _table(heads, rows)]
    parts += ["### Environment", _table(("", "version or name"), environment.items())]
    return "\n\n".join(parts) + "\n"


def _reason_row(reason: Reason, times: int) -> tuple[str, ...]:
    return reason.phase, reason.target, str(times), reason.where or "-", reason.text


def _pass_row(phase: Phase, run: Mapping[str, Any]) -> tuple[str, ...]:
    if run.get("from_cache"):
        graph, nodes, ms = "-", "did not run: the graph came from torch's cache, as the pass had left it", "-"
    else:
        counts = f"{run['nodes_before']} to {run['nodes_after']}"
        graph, ms = run["graph"], f"{run['seconds'] * 1000:.1f}"
        nodes = counts if run["changed"] else f"{run['nodes_before']}, changed nothing"
    return phase, run["target"], run["name"], run["hook"], graph, nodes, ms


def _trial_row(phase: Phase, trial: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = [(trial["median_ms"], ".2f"), (trial["high_ms"], ".2f"), (trial["samples"], "d")]
    cells = [
        "-" if value is None else format(value, form) for value, form in [*numbers, (trial["compile_seconds"], ".1f")]
    ]
    return phase, trial["candidate"], *cells, trial["verdict"], trial["reason"] or "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *(tuple(map(_cell, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Text as it is, in one line of a table: torch's reasons have line ends, pipes, and names like ``__call__``."""
    lines = (" ".join(line.split()) for line in text.splitlines())
    escaped = (_SPECIAL.sub(r"\\\1", line.replace("&", "&amp;").replace("<", "&lt;")) for line in lines if line)
    return "<br>".join(escaped)
