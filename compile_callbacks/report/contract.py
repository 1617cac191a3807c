"""Compares a record of ``compile_report.json`` with a contract, a short JSON file that a person edits.

Imports no torch, so that ``compile-callbacks check`` starts fast.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import EAGER, PHASES, Phase
from compile_callbacks.profiling.comparison import MIN_SAMPLES, Comparison
from compile_callbacks.profiling.events import EVENT_KINDS
from compile_callbacks.profiling.recompiles import short_reason
from compile_callbacks.report.data import VERSION as REPORT_VERSION
from compile_callbacks.report.data import PhaseDiagnostics, PhaseReport

VERSION = 1
"""The version of contracts."""

MARGIN = 0.2

_EVENTS = {info.limit: ("kind", kind) for kind, info in EVENT_KINDS.items() if info.limit}
_EVENTS["differing_graphs"] = ("verdict", "differs")
_MEASURED = {
    name: figure.limit
    for figures in (PhaseReport, PhaseDiagnostics)
    for name, figure in figures.declared().items()
    if figure.limit
}
_NUMBER = (int, float)
_PHASE_FIELDS: dict[str, Any] = {"targets": list, "graphs": int, "graph_breaks": dict, "uncompared_graphs": int}
_PHASE_FIELDS |= dict.fromkeys(_EVENTS, int) | dict.fromkeys(_MEASURED, _NUMBER)
_FIELDS: dict[str, Any] = {"version": int, "call": str, "torch": str, "margin": _NUMBER} | dict.fromkeys(PHASES, dict)
_NEEDED = (
    f"memory needs a GPU, and a speedup {MIN_SAMPLES} eager and {MIN_SAMPLES} compiled steps of one workload that vary "
    "little"
)


class ContractError(ValueError):
    """A contract or a report cannot be read, or the report lacks figures that the contract limits."""


class Breach(NamedTuple):
    """A figure that the contract does not allow."""

    phase: Phase
    figure: str
    value: float | str
    allowed: float | str
    reason: str

    def __str__(self) -> str:
        value, allowed = (f"{x:.4g}" if isinstance(x, float) else x for x in (self.value, self.allowed))
        return f"{self.phase}.{self.figure}: {value}, allowed {allowed}: {self.reason}"


class _Measurement(NamedTuple):
    value: float
    reason: str
    low: float  # the ends of the interval of the value
    high: float


def read_record(path: Path, call: str | None = None) -> dict[str, Any]:
    """Return the last record of a report file, or the last record of a trainer call, such as ``"fit"``."""
    records = _load(path)
    records = [r for r in records if call in (None, r.get("call"))] if isinstance(records, list) else []
    if not records:
        raise ContractError(f"{path} contains no record of a call of {call or 'the trainer'}")
    record: dict[str, Any] = records[-1]
    if record.get("version") != REPORT_VERSION:
        raise ContractError(f"{path}: the record has version {record.get('version')}, not {REPORT_VERSION}")
    if record["exception"]:
        raise ContractError(f"{path}: {record['exception']} ended the call, so its figures are incomplete")
    return record


def read_contract(path: Path) -> dict[str, Any]:
    """Read a contract, and check its fields."""
    contract = {"margin": MARGIN, **_checked(path, "", _load(path), _FIELDS)}
    if contract.get("version") != VERSION:
        raise ContractError(f"{path}: version={contract.get('version')!r}, but this library reads version {VERSION}")
    if not 0 <= contract["margin"] < math.inf:
        raise ContractError(f"{path}: margin={contract['margin']!r} must be a number from 0 on, such as {MARGIN}")
    if not any(phase in contract for phase in PHASES):
        raise ContractError(f"{path} checks nothing: it has neither of the phases {' and '.join(PHASES)}")
    for phase in PHASES:
        if not all(isinstance(name, str) for name in contract.get(phase, {}).get("targets", ())):
            raise ContractError(f"{path}: {phase}.targets must be a list of names")
        breaks = _checked(path, f"{phase}.", contract.get(phase, {}), _PHASE_FIELDS).get("graph_breaks", {})
        _checked(path, f"{phase}.graph_breaks.", breaks, dict.fromkeys(breaks, int))
    return contract


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"{path} cannot be read: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError(f"a key of {', '.join(map(repr, data))} occurs twice")
    return data


def _checked(path: Path, prefix: str, data: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ContractError(f"{path} is not a contract: it must be a JSON object")
    for name, value in data.items():
        if name not in types:
            raise ContractError(f"{path}: {unknown('field', prefix + name, [prefix + known for known in types])}")
        if not isinstance(value, types[name]) or isinstance(value, bool):
            raise ContractError(f"{path}: {prefix}{name}={value!r} has the wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise ContractError(f"{path}: {prefix}{name}={value!r} must be finite")
    return data


def make_contract(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the contract that allows the figures of a record, for each compiled phase, and the figures left out."""
    contract: dict[str, Any] = {"version": VERSION, "margin": MARGIN, "torch": record["environment"]["torch"]}
    if record["call"] is not None:  # CompileReport.save does not know the call
        contract["call"] = record["call"]
    left_out = []
    for phase in PHASES:
        data = record["report"][phase]
        if not (targets := sorted(_compiled_targets(data))):
            continue
        allowed: dict[str, Any] = {"targets": targets, "graph_breaks": {}}
        contract[phase] = allowed
        for name, (value, reason, low, _) in _figures(data).items():
            figure_name, _, kind = name.partition(": ")
            if name == "speedup" and low * (1 + MARGIN) < value:
                left_out.append(f"{phase}.speedup, because step times vary by more than the margin ({reason})")
            elif kind:
                allowed["graph_breaks"][kind] = value
            else:
                allowed[figure_name] = float(f"{value:.4g}") if name in _MEASURED else value
    if not any(phase in contract for phase in PHASES):
        raise ContractError("the run compiled nothing, so a contract of its report would check nothing")
    return contract, left_out


def compare(record: Mapping[str, Any], contract: Mapping[str, Any]) -> tuple[list[Breach], list[str]]:
    """Compare a record with a contract. Return the breaches, and the figures that the report lacks."""
    breaches: list[Breach] = []
    missing: list[str] = []
    for phase in PHASES:
        data, allowed = record["report"].get(phase), contract.get(phase)
        if allowed is None:
            continue
        if not data or ((data["compile_seconds"], data["verdict"]) == (None, None) and data["mode"] != EAGER):
            missing.append(f"the report has no {phase} phase, or no step of it that could run compiled")
            continue
        figures, compiled = _figures(data), _compiled_targets(data)
        lost = [target for target in allowed.get("targets", ()) if target not in compiled]
        breaches += [Breach(phase, "targets", f"{name} not compiled", "none", _why_not(data, name)) for name in lost]
        for name, (value, reason, low, high) in figures.items():
            figure_name, _, kind = name.partition(": ")
            if figure_name not in allowed:
                continue
            limit = allowed[figure_name].get(kind, 0) if kind else allowed[figure_name]
            margin = 1 + contract["margin"] if name in _MEASURED else 1
            at_least = _MEASURED.get(name) == "least"
            bound = limit / margin if at_least else limit * margin
            if high < bound if at_least else low > bound:
                breaches.append(Breach(phase, name, value, bound, reason))
        absent = [name for name in _MEASURED if name in allowed and name not in figures and compiled]
        missing += [f"the report has no figure for {phase}.{name} ({_NEEDED})" for name in absent]
    return breaches, missing


def _figures(data: Any) -> dict[str, _Measurement]:
    """Return the figures of a phase that have a value. Each kind of graph break is a figure."""
    figures: dict[str, _Measurement] = {}

    def add(name: str, value: float, reason: str, low: float | None = None, high: float | None = None) -> None:
        figures[name] = _Measurement(value, reason, value if low is None else low, value if high is None else high)

    compiled, details = _compiled_targets(data), data["diagnostics"]
    add("graphs", compiled.total(), ", ".join(f"{target} {count}" for target, count in compiled.items()))
    breaks = _events(data, "kind", "graph_break")
    for kind in dict.fromkeys(map(_kind, breaks)):
        of_kind = [event for event in breaks if _kind(event) == kind]
        add(f"graph_breaks: {kind}", len(of_kind), _reasons(of_kind))
    for name, which in _EVENTS.items():
        add(name, len(_events(data, *which)), _reasons(_events(data, *which)))
    not_compared, all_compared = _events(data, "verdict", "not compared"), _events(data, "kind", "verify")
    never = max(compiled.total() - len(all_compared), 0)
    add("uncompared_graphs", len(not_compared) + never, _reasons(not_compared) or "the run did not verify them")
    for name in _MEASURED.keys() - {"compile_seconds", "speedup"}:
        value = data[name] if name in data else details.get(name)
        if value is not None:
            add(name, value, "measured in the run")
    peaks = (("peak_memory_mib", "a compiled step"), ("peak_memory_at_most_mib", "the process"))
    for name, why in (peak for peak in peaks if details[peak[0]] is not None):
        add("peak_memory_mib", details[name], f"the highest peak of {why}")
    low, high = details["speedup_interval"] or (1.0, 1.0)
    if (seconds := data["compile_seconds"]) is not None:
        compiles = sorted(_events(data, "kind", "compile"), key=lambda event: -event.get("seconds", 0))
        longest = ", ".join(f"{event['target']} {event.get('seconds', 0):.1f} s" for event in compiles[:3])
        # A single measurement. Other work on the machine can double it, or make it longer by as much as it did steps.
        add("compile_seconds", seconds, longest, low=seconds / max(2.0, high / low))
    if details["speedup_interval"]:
        medians = data["eager_step_ms"], data["compiled_step_ms"]
        possible_causes = _reasons(_events(data, "kind", "cudagraph_skip") + _events(data, "kind", "fallback"))
        reason = "eager {:.4g} ms, compiled {:.4g} ms".format(*medians) + (
            f"; {possible_causes}" if possible_causes else ""
        )
        ratio = medians[0] / medians[1]
        if Comparison(ratio, low, high).outcome != "not comparable":
            add("speedup", ratio, reason, low, high)
    return figures


def _events(data: Any, attribute: str, value: str) -> list[dict[str, Any]]:
    """Return events of a phase in order, with a `Tune` of the chosen candidate."""
    details = data["diagnostics"]
    chosen = [trial["candidate"] for trial in details["trials"] if trial["verdict"] == "chosen"]
    events = [event for event in details["events"] if event.get(attribute) == value]
    return [event for event in events if not chosen or event.get("candidate") in (None, *chosen)]


def _compiled_targets(data: Any) -> Counter[str]:
    """Return the number of graphs of each compiled target."""
    graphs: Counter[str] = Counter()
    for event in _events(data, "kind", "compile"):
        graphs[event["target"]] += event.get("graphs", 0)
    return +graphs


def _kind(graph_break: Mapping[str, Any]) -> str:
    """Return the first line of torch's reason, which names the kind of graph break."""
    return (str(graph_break.get("reason") or "").strip() or "unknown").splitlines()[0]


def _reasons(events: Sequence[Mapping[str, Any]]) -> str:
    """Return the first three different reasons of events, each with the target and the line of code."""
    texts = []
    for event in events:
        where = f" ({Path(event['file']).name}:{event.get('line')})" if event.get("file") else ""
        texts.append(f"{event['target']}{where}: {short_reason(event.get('reason') or 'torch gives no reason')}")
    return "; ".join(list(dict.fromkeys(texts))[:3])


def _why_not(data: Any, target: str) -> str:
    """Return why a target is not compiled."""
    if data["mode"] == EAGER:
        return f"the mode is {data['mode']!r}"
    events = [e for kind in ("fallback", "graph_break") for e in _events(data, "kind", kind) if e["target"] == target]
    return _reasons(events) or f"the run compiled {', '.join(_compiled_targets(data)) or 'nothing'}"
