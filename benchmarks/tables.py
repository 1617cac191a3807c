"""Rows of measurements: shared options, medians and intervals, JSON files and Markdown tables."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_callbacks.profiling.comparison import compare, median_ms, spread_ms
from compile_callbacks.report.file import environment

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def alternate(timers: Mapping[str, Callable[[], float | None]], blocks: int) -> dict[str, list[float]]:
    """Call each timer once per round, and reverse the order after each round. Ignore a timer that returns ``None``."""
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for number in range(blocks):
        for name in reversed(samples) if number % 2 else samples:
            if (milliseconds := timers[name]()) is not None:
                samples[name].append(milliseconds)
    return samples


def summarize(block_ms: Sequence[float]) -> dict[str, Any]:
    """Return the median and the interquartile range of block times, and the number of blocks."""
    samples = tuple(block_ms)
    return {"step_ms": median_ms(samples), "spread_ms": spread_ms(samples), "samples": len(samples)}


def compare_pairs(before: Row, after: Row) -> dict[str, Any]:
    """Compare two ways whose blocks alternate.

    Return the median ratio of two blocks of the same round, its 95% interval, and whether the interval is above 1;
    ``None`` if unknown. Drift between rounds changes both blocks of a round by about the same factor.
    """
    # One way may lack the last round, if the time was used up.
    pairs = zip(before.get("block_ms", ()), after.get("block_ms", ()), strict=False)
    ratios = [theirs / ours for theirs, ours in pairs]
    found = compare([ratios], [[1.0] * len(ratios)])
    if found is None or found.outcome == "not comparable":
        return {"speedup": None, "speedup_interval": None, "faster": None}
    return {"speedup": found.ratio, "speedup_interval": [found.low, found.high], "faster": found.outcome == "faster"}


def commit() -> str | None:
    """Return the last commit of this clone that changed the package, because figures depend on no other files.

    The variable COMMIT, if it is set, is that of a copy of the files.
    """
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    found = git("log", "-1", "--format=%h", "--abbrev=12", "--", "compile_callbacks")
    return f"{found}-dirty" if found and git("status", "--porcelain", "--", "compile_callbacks") else found or None


def git(*arguments: str) -> str:
    """The output of git in this clone; empty if there is no clone or no git."""
    try:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # git is not installed
        return ""


def as_result(
    title: str, rows: Sequence[Mapping[str, Any]], command: str, found: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return rows as JSON-ready data. ``found`` is the `environment` of the process that ran the steps."""
    found = found or environment()
    versions = {name: found.get(name) for name in ("python", "torch", "triton", "lightning")}
    date = dt.datetime.now(dt.UTC).date().isoformat()
    head = {"title": title, "commit": commit(), "date": date, "device": found["device"]}
    return {**head, "versions": versions, "command": command, "rows": list(rows)}


def read(pattern: str) -> list[dict[str, Any]]:
    """The results of the files in benchmarks/results that match, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{pattern}.json"))]


def origins(results: Iterable[Mapping[str, Any]]) -> str:
    """The devices, the versions, the commits and the dates of results."""
    names = {"python": "Python", "torch": "torch", "triton": "Triton", "lightning": "Lightning"}
    found: dict[str, tuple[dict[str, None], dict[str, None], set[str]]] = {}
    for result in results:
        versions = ", ".join(f"{name} {result['versions'][key]}" for key, name in names.items())
        devices, commits, dates = found.setdefault(versions, ({}, {}, set()))
        devices[result["device"]] = commits[str(result["commit"])] = None
        dates.add(str(result["date"]))
    return "; ".join(
        f"{' and '.join(devices)}, {versions}, commit {', '.join(commits)}, "
        + " to ".join(sorted({min(dates), max(dates)}))
        for versions, (devices, commits, dates) in found.items()
    )


def save(path: Path | None, title: str, rows: Sequence[Row], found: Mapping[str, str] | None = None) -> None:
    """Write the rows as benchmarks/results/README.md describes, if there is a path."""
    if path is not None:
        result = as_result(title, rows, command_line(), found)
        path.write_text(json.dumps(result, indent=1) + "\n")


def command_line() -> str:
    """The command of this process, without the file that it writes and without folders of this machine."""
    arguments = list(sys.argv[1:])
    if "--json" in arguments:
        position = arguments.index("--json")
        del arguments[position : position + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def in_own_process(way: str, *, empty_cache: bool = True) -> Row:
    """Run this script with ``--run-way`` in a process, which has an empty cache, and writes its row to `ROW`."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        caches = caches if empty_cache else {}
        command = [sys.executable, *sys.argv, "--run-way", way]
        subprocess.run(command, env={**os.environ, **caches, "ROW": f"{folder}/row"}, check=True)
        return json.loads(Path(folder, "row").read_text())


def write_row(row: Row) -> None:
    """Pass the row of this process to the process that started it."""
    Path(os.environ["ROW"]).write_text(json.dumps(row))


def print_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for cells in lines:
        print("| " + " | ".join(cells) + " |")
    print()


def print_columns(columns: Mapping[str, str], rows: Iterable[Row]) -> None:
    """Print a Markdown table of rows; ``columns`` has the format of each field. Fields that no row has are left out."""
    rows = list(rows)
    shown = {name: form for name, form in columns.items() if any(row.get(name) not in (None, "") for row in rows)}
    lines = ([cell(row.get(name), form) for name, form in shown.items()] for row in rows)
    print_table([name.replace("_", " ").replace("mib", "MiB") for name in shown], lines)


def tried(row: Row) -> str:
    """The candidates of "auto" as a cell."""
    return "; ".join(
        f"{trial['candidate']} {trial['verdict']}" + (f" {trial['median_ms']:.2f} ms" if trial["median_ms"] else "")
        for trial in row["trials"]
    )


def cell(value: Any, form: str) -> str:
    """A value as a cell. Words stay unchanged."""
    return "-" if value is None else value if isinstance(value, str) else form.format(value)


def find(rows: Iterable[Row], way: str, **work: Any) -> Row:
    """The row of a way and a workload; an empty row if there is none."""
    return next((r for r in rows if r["way"] == way and all(r[k] == v for k, v in work.items())), {})


def in_order(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Any]:
    """The distinct values of a key, in the order of the rows."""
    return list(dict.fromkeys(key(row) for row in rows))


def times(ratio: float | None) -> str:
    """A ratio as a cell."""
    return "" if ratio is None else f"{ratio:.2f}x"


def with_interval(compared: Row) -> str:
    """A speedup and its 95% interval as a cell, of a row or of `compare_pairs`."""
    if compared.get("speedup") is None:
        return ""
    return "{}x ({} to {})".format(*(f"{v:.2f}" for v in (compared["speedup"], *compared["speedup_interval"])))


def ms(value: float | None) -> str:
    """Milliseconds as a cell."""
    return "failed" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"
