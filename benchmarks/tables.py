"""Rows of measurements: shared options, JSON files and Markdown tables."""

from __future__ import annotations

import argparse
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
from bench_measure import as_result, compare_blocks
from conduct import Group, conduct, say

Row = dict[str, Any]
RESULTS = Path(__file__).parent / "results"


def parser_for(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser


def add_pacing(parser: argparse.ArgumentParser) -> None:
    """Add the options of the benchmarks that run each way in its own process."""
    add = parser.add_argument
    add("--steps", type=int, default=60, help="timed steps of each way, at least")
    add("--blocks", type=int, default=10, help="number of blocks that these steps are divided into")
    add("--block-seconds", type=float, default=0.1, help="shortest duration of a block")
    add("--prepare-steps", type=int, default=10, help="steps of each way before the timed ones")
    help_text = "time that each way runs before its first block; the callback times most of its first 600 steps itself"
    add("--warm-up-seconds", type=float, default=0.0, help=help_text)
    jobs = max(1, len(os.sched_getaffinity(0)) // 2)
    add("--jobs", type=int, default=jobs, help="number of processes that compile at the same time")
    add("--patience", type=float, default=400.0, metavar="SECONDS", help="a way that takes longer to prepare fails")


def rows_of(args: argparse.Namespace, title: str, batches: Iterable[Sequence[Group]], **how: bool) -> list[Row]:
    """The rows of `conduct`; the groups of a batch prepare together."""
    rows: list[Row] = []
    environment = None
    for measured in (rows for groups in batches for rows in conduct(groups, args, **how)):
        eager_ms = next((row["block_ms"] for row in measured if row["way"] == "eager"), ())
        for row in measured:
            environment = row.pop("environment", None) or environment
            row |= compare_blocks(() if row["way"] == "eager" else eager_ms, row["block_ms"])
            say(f"{row['model']}, batch {row['batch_size']}, {row['way']}: step ms {ms(row['step_ms'])}")
        rows += measured
        save(args.json, title, rows, environment)
    print_environment(as_result(title, rows, "", environment))
    return rows


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


def save(path: Path | None, title: str, rows: Sequence[Row], environment: Mapping[str, str] | None = None) -> None:
    """Write the rows as benchmarks/results/README.md describes, if there is a path."""
    if path is not None:
        result = as_result(title, rows, command_line(), environment)
        path.write_text(json.dumps(result, indent=1) + "\n")


def command_line() -> str:
    """The command of this process, without the file that it writes and without folders of this machine."""
    arguments = list(sys.argv[1:])
    if "--json" in arguments:
        position = arguments.index("--json")
        del arguments[position : position + 2]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def in_own_process(*work: str) -> Row | None:
    """Run this script with ``--run`` in a process with an empty cache, and return its row; ``None`` if it fails.

    The process writes the row, as JSON, to the file that the variable ROW names.
    """
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, *sys.argv, "--run", *work]
        subprocess.run(command, env={**os.environ, **caches, "ROW": f"{folder}/row"}, check=False)
        row = Path(folder, "row")
        return json.loads(row.read_text()) if row.exists() else None


def print_environment(result: Mapping[str, Any]) -> None:
    """Print the device and the versions of a result."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    print(f"{result['device'] or 'unknown device'}, {versions or 'unknown versions'}\n")


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


def cell(value: Any, form: str) -> str:
    """A value as a cell. Words, such as "never" instead of a number of steps, stay unchanged."""
    return "-" if value is None else value if isinstance(value, str) else form.format(value)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference divided by the norm of ``expected``."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


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
    """A speedup and its 95% interval as a cell, of a row or of `compare_blocks`."""
    if compared.get("speedup") is None:
        return ""
    return "{}x ({} to {})".format(*(f"{v:.2f}" for v in (compared["speedup"], *compared["speedup_interval"])))


def ms(value: float | None) -> str:
    """Milliseconds as a cell."""
    return "failed" if value is None else f"{value:.3f}" if value < 1 else f"{value:.2f}"
