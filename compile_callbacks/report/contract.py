"""Compares a record of ``compile_report.json`` with a contract, a short JSON file that a person edits.

Imports no torch, so that ``compile-callbacks check`` starts fast.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compile_callbacks._utils.messages import check_type, unknown
from compile_callbacks._utils.phases import EAGER, PHASES
from compile_callbacks.profiling.comparison import MIN_SAMPLES
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.report.figures import PhaseReport
from compile_callbacks.report.file import VERSION as REPORT_VERSION

VERSION = 1
"""The version of contracts."""

MARGIN = 0.2
_EVENTS = {"recompiles": "recompile", "fallbacks": "fallback", "skipped_cudagraphs": "cudagraph_skip"}
_VERDICTS = {"differing_graphs": "differs", "uncompared_graphs": "not compared"}
_WITH_MARGIN = ("peak_memory_mib", "compile_seconds", "speedup")
_PHASE_FIELDS = ("targets", "graphs", "graph_breaks", *_EVENTS, *_VERDICTS, *_WITH_MARGIN)
_FIELDS = ("version", "call", "torch", "margin", *PHASES)
_BREACH = ("phase", "figure", "value", "allowed", "reason")
_NEEDED = (
    "memory needs compiled steps that raise the process's peak on a GPU, and a speedup "
    f"{MIN_SAMPLES} steps of each kind of one workload that vary little"
)


class ContractError(ValueError):
    """A contract or a report cannot be read, or the report lacks figures that the contract limits."""


class _Value(NamedTuple):
    value: float
    reason: str
    best: float  # the end of the interval of the value that a contract allows more easily


def read_record(path: Path, call: str | None = None) -> dict[str, Any]:
    """Return the last record of a report file, or the last record of a trainer call, such as ``"fit"``."""
    records = [record for record in _load(path) if call in (None, record.get("call"))]
    if not records:
        raise ContractError(f"{path} contains no record of a call of {call or 'the trainer'}")
    record: dict[str, Any] = records[-1]
    if record.get("version") != REPORT_VERSION:
        raise ContractError(f"{path}: the record has version {record.get('version')}, not {REPORT_VERSION}")
    if record["exception"]:
        raise ContractError(f"{path}: {record['exception']} ended the call, so its figures are incomplete")
    return record


def read_contract(path: Path) -> dict[str, Any]:
    """Read a contract, and check the names of its fields."""
    contract = {"margin": MARGIN, **_load(path)}
    if contract.get("version") != VERSION:
        raise ContractError(f"{path}: version={contract.get('version')!r}, but this library reads version {VERSION}")
    if contract["margin"] < 0:
        raise ContractError(f"{path}: margin={contract['margin']!r} must be a number from 0 on, such as {MARGIN}")
    names = [*contract, *(f"{phase}.{name}" for phase in PHASES for name in contract.get(phase, ()))]
    known = [*_FIELDS, *(f"{phase}.{name}" for phase in PHASES for name in _PHASE_FIELDS)]
    for name in names:
        if name not in known:
            raise ContractError(f"{path}: {unknown('field', name, known)}")
    if not contract.keys() & {*PHASES}:
        raise ContractError(f"{path} checks nothing: it has neither of the phases {' and '.join(PHASES)}")
    return contract


def _load(path: Path) -> Any:
    def refuse(constant: str) -> None:  # because each comparison with NaN is false
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(path.read_bytes(), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error


def make_contract(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contract that allows the figures of a record, for each compiled phase.

    A speedup whose interval is wider than the margin is left out.
    """
    contract: dict[str, Any] = {"version": VERSION, "margin": MARGIN, "torch": record["environment"]["torch"]}
    if record["call"] is not None:  # CompileReport.save does not know the call
        contract["call"] = record["call"]
    for phase in PHASES:
        report = PhaseReport.from_dict(record["report"][phase])
        if not (compiled := _compiled_targets(report)):
            continue
        allowed = contract[phase] = {"targets": sorted(compiled), "graph_breaks": {}}
        low, *_ = report.diagnostics.speedup_interval or (0.0,)
        for name, (value, *_) in _figures(report).items():
            if kind := name.partition(": ")[2]:
                allowed["graph_breaks"][kind] = value
            elif name != "speedup" or low * (1 + MARGIN) >= value:
                allowed[name] = float(f"{value:.4g}") if name in _WITH_MARGIN else value
    if not contract.keys() & {*PHASES}:
        raise ContractError("the run compiled nothing, so a contract of its report would check nothing")
    return contract


def compare(record: Mapping[str, Any], contract: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Compare a record with a contract. Return the breaches, and the figures that the report lacks.

    A breach has the ``phase``, the ``figure``, its ``value``, what is ``allowed``, and the ``reason``.
    """
    breaches: list[tuple[object, ...]] = []
    missing: list[str] = []
    for phase in PHASES:
        if (allowed := contract.get(phase)) is None:
            continue
        data = record["report"].get(phase)
        report = PhaseReport.from_dict(data and {**data, "diagnostics": data["diagnostics"]})  # which must be there
        if not data or ((report.compile_seconds, report.verdict) == (None, None) and report.mode != EAGER):
            missing.append(f"the report has no {phase} phase, or no step of it that could run compiled")
            continue
        figures, compiled = _figures(report), _compiled_targets(report)
        check_type(f"{phase}.targets", targets := allowed.get("targets", []), list, "a list of names")
        absent = [target for target in targets if target not in compiled]
        breaches += [(phase, "targets", f"{t} not compiled", "none", _why_not(report, t)) for t in absent]
        for name, (value, reason, best) in figures.items():
            figure, _, kind = name.partition(": ")
            if figure in allowed:
                limit = allowed[figure].get(kind, 0) if kind else allowed[figure]
                margin = 1 + contract["margin"] if name in _WITH_MARGIN else 1
                bound = limit / margin if name == "speedup" else limit * margin
                if best < bound if name == "speedup" else best > bound:
                    breaches.append((phase, name, value, bound, reason))
        lacks = [name for name in _WITH_MARGIN if name in allowed and name not in figures and compiled]
        missing += [f"the report has no figure for {phase}.{name} ({_NEEDED})" for name in lacks]
    return [dict(zip(_BREACH, breach, strict=True)) for breach in breaches], missing


def _figures(report: PhaseReport) -> dict[str, _Value]:
    """Return the figures of a phase that have a value. Each kind of graph break is a figure."""
    details, compiled = report.diagnostics, _compiled_targets(report)
    verified = details.events_of("verify")
    events = {name: details.events_of(kind) for name, kind in _EVENTS.items()}
    events |= {name: [e for e in verified if e.get("verdict") == verdict] for name, verdict in _VERDICTS.items()}
    for event in details.events_of("graph_break"):
        # The first line of torch's reason names the kind of graph break.
        kind = (str(event.get("reason") or "").strip() or "unknown").splitlines()[0]
        events.setdefault(f"graph_breaks: {kind}", []).append(event)
    total, graphs = compiled.total(), ", ".join(f"{target} {graphs}" for target, graphs in compiled.items())
    figures = {"graphs": _Value(total, graphs, total)}
    for name, found in events.items():
        count = len(found) + max(total - len(verified), 0) * (name == "uncompared_graphs")
        figures[name] = _Value(count, _reasons(found) or "the run did not verify them", count)
    if (peak := details.peak_memory_mib) is not None:
        figures["peak_memory_mib"] = _Value(peak, "the highest peak of a compiled step", peak)
    low, high = details.speedup_interval or (1.0, 1.0)
    if (seconds := report.compile_seconds) is not None:
        compiles = sorted(details.events_of("compile"), key=lambda event: -event.get("seconds", 0))
        longest = ", ".join(f"{event['target']} {event.get('seconds', 0):.1f} s" for event in compiles[:3])
        # A single measurement. Other work on the machine can double it, or make it longer by as much as it did steps.
        figures["compile_seconds"] = _Value(seconds, longest, seconds / max(2.0, high / low))
    medians = report.eager_step_ms, report.compiled_step_ms
    if details.speedup_interval and medians[0] and medians[1] and report.verdict != "not comparable":
        causes = _reasons(details.events_of("cudagraph_skip") + details.events_of("fallback"))
        reason = "; ".join(filter(None, ("eager {:.4g} ms, compiled {:.4g} ms".format(*medians), causes)))
        figures["speedup"] = _Value(medians[0] / medians[1], reason, high)
    return figures


def _compiled_targets(report: PhaseReport) -> Counter[str]:
    """Return the number of graphs of each compiled target."""
    graphs: Counter[str] = Counter()
    for event in report.diagnostics.events_of("compile"):
        graphs[event["target"]] += event.get("graphs", 0)
    return +graphs


def _reasons(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the first three different reasons of events, each with the target and the line of code."""
    texts = []
    for event in events:
        where = f" ({Path(event['file']).name}:{event.get('line')})" if event.get("file") else ""
        texts.append(f"{event['target']}{where}: {short_reason(event.get('reason'))}")
    return "; ".join(list(dict.fromkeys(texts))[:3])


def _why_not(report: PhaseReport, target: str) -> str:
    """Return why a target is not compiled."""
    if report.mode == EAGER:
        return f"the mode is {report.mode!r}"
    events = report.diagnostics.events_of("fallback") + report.diagnostics.events_of("graph_break")
    others = ", ".join(_compiled_targets(report)) or "nothing"
    return _reasons([event for event in events if event["target"] == target]) or f"the run compiled {others}"
