"""Train small models of other packages eagerly and with the callback, and write how the two runs compare.

    .venv-models/bin/python benchmarks/models_table.py build/models.json [--no-codegen] [NAME ...]
    .venv-models/bin/python benchmarks/models_table.py build/models.json --table [--before build/before.json]

With ``--no-codegen``, Inductor calls torch's own kernels: graphs and recompiles are the same, and compiling takes a
fraction of the time. Compile seconds and step times then mean little; the table marks them with ``*``.

Each trial of ``tests/models`` runs in a process of its own. A trial that is in the file already is run again only if
its name, or a part of it, is given.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_measure import as_result
from tables import print_columns

ROOT = Path(__file__).parent.parent
TITLE = "Small models of other packages: eager and with the callback"
FAMILIES = ("loops", "texts", "vision", "test_forecasting")
PACKAGES = (
    "anomalib", "lightly", "monai", "neuralforecast", "peft", "pytorch-forecasting", "segmentation-models-pytorch",
    "timm", "torch-geometric", "torchvision", "transformers",
)  # fmt: skip
COLUMNS = {
    "model": "{}", "phase": "{}", "graphs": "{}", "recompiles": "{}", "breaks": "{}", "frames": "{}", "traces": "{}",
    "compile s": "{}", "step ms": "{}", "run s": "{}", "result": "{}",
}  # fmt: skip
COMPARED = {
    "model": "{}", "phase": "{}", "graphs": "{}", "recompiles": "{}", "breaks": "{}", "frames": "{}", "traces": "{}",
    "compile s": "{}", "eager ms": "{}", "compiled ms": "{}", "result": "{}",
}  # fmt: skip


def trials() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT))
    found: dict[str, Any] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"tests.models.{family}")
        found |= {trial.name: trial for trial in module.TRIALS}
        if hasattr(module, "neuralforecast_figures"):
            found["neuralforecast NHITS"] = module.neuralforecast_figures
    return found


def one(name: str, codegen: bool) -> dict[str, Any]:
    """Run a trial in this process."""
    import torch

    from tests.models.trial import Trial, figures

    trial = trials()[name]
    if not codegen:
        import torch._inductor.config

        torch._inductor.config.fallback_by_default = True
    torch.compile(lambda x: x + 1)(torch.ones(3))  # the process's first compile builds a C++ header for seconds
    torch.compiler.reset()
    return figures(trial) if isinstance(trial, Trial) else trial()


def in_own_process(name: str, args: argparse.Namespace, cache: str) -> dict[str, Any]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    environment["OMP_NUM_THREADS"] = "1"  # models this small, and other work on the machine
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        how = ["--no-codegen"] if args.no_codegen else []
        command = [sys.executable, __file__, file.name, "--one", name, *how]
        try:
            done = subprocess.run(
                command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=args.limit
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {args.limit} s"}
        if done.returncode or not Path(file.name).read_text():
            return {"failed": (done.stderr or done.stdout)[-1500:]}
        return json.loads(Path(file.name).read_text())


def rows_of(name: str, found: Mapping[str, Any], *, codegen: bool) -> list[dict[str, Any]]:
    """One row for each phase that ran."""
    if "failed" in found:
        print(f"{name}: {found['failed']}", file=sys.stderr)
        return []
    run = found["seconds"]
    return [
        {
            "model": name,
            "phase": phase,
            "codegen": codegen,
            "graphs": of_phase["graphs"],
            "recompiles": of_phase["recompiles"],
            "graph_breaks": of_phase["graph_breaks"],
            "frames": of_phase.get("frames"),
            "traces_of_a_frame": of_phase.get("traces_of_a_frame"),
            "compile_seconds": of_phase["compile_seconds"] or None,
            "eager_ms": _rounded(of_phase["eager_ms"]),
            "compiled_ms": _rounded(of_phase["compiled_ms"]),
            "eager_run_seconds": run["eager"],
            "compiled_run_seconds": run["compiled"],
            "result": "equal" if found["equal"] else "different",
        }
        for phase in ("train", "infer")
        if (of_phase := found[phase])["graphs"] or of_phase["eager_ms"] is not None
    ]


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 1)


def cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the table shows it."""
    mark = "" if row["codegen"] else " *"
    compile_seconds = row["compile_seconds"]
    return {
        **{name: row[name] for name in ("model", "phase", "graphs", "recompiles", "frames", "result")},
        "breaks": row["graph_breaks"],
        "traces": row["traces_of_a_frame"],
        "compile s": None if compile_seconds is None else f"{compile_seconds}{mark}",
        "step ms": f"{row['eager_ms']} → {row['compiled_ms']}{mark}",
        "run s": f"{row['eager_run_seconds']} → {row['compiled_run_seconds']}{mark}",
    }


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Two rows of the same trial and phase, as the table shows them."""
    assert (before["model"], before["phase"]) == (after["model"], after["phase"])
    fields = {
        "graphs": "graphs", "recompiles": "recompiles", "breaks": "graph_breaks", "frames": "frames",
        "traces": "traces_of_a_frame", "compile s": "compile_seconds", "eager ms": "eager_ms",
        "compiled ms": "compiled_ms", "result": "result",
    }  # fmt: skip
    pairs = {column: (before[field], after[field]) for column, field in fields.items()}
    changes = {column: old if old == new else f"{old} → {new}" for column, (old, new) in pairs.items()}
    return {"model": after["model"], "phase": after["phase"], **changes}


def print_rows(path: Path, before: Path | None = None) -> None:
    """Print the table of a file, or the table of the changes from one file to another."""
    rows = json.loads(path.read_text())["rows"]
    if before is None:
        print_columns(COLUMNS, map(cells, rows))
    else:
        print_columns(COMPARED, map(compared, json.loads(before.read_text())["rows"], rows))


def write(path: Path, rows: list[dict[str, Any]], commands: list[str]) -> None:
    result = as_result(TITLE, rows, "\n".join(commands))
    result["device"] = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    packages = {"packages": {package: version(package) for package in PACKAGES}}
    del result["rows"]
    path.write_text(json.dumps({**result, **packages, "rows": rows}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="the file of the rows")
    parser.add_argument("names", nargs="*", metavar="NAME", help="trials to run again: parts of their names")
    parser.add_argument("--no-codegen", action="store_true", help="compile in a fraction of the time, without kernels")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table of the file")
    parser.add_argument("--before", type=Path, metavar="JSON", help="with --table: an earlier file to compare with")
    parser.add_argument("--limit", type=float, default=400, metavar="SECONDS", help="a trial that takes longer fails")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_intermixed_args()  # so that names may follow an option
    if args.one:
        try:
            found = one(args.one, not args.no_codegen)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        args.json.write_text(json.dumps(found))
        return
    if args.table:
        print_rows(args.json, args.before)
        return
    recorded = json.loads(args.json.read_text()) if args.json.exists() else {"rows": [], "command": ""}
    commands = [*filter(None, recorded["command"].split("\n")), shlex.join(["python", *sys.argv])]
    rows = {name: [row for row in recorded["rows"] if row["model"] == name] for name in trials()}
    with tempfile.TemporaryDirectory() as cache:
        for name in rows:
            asked = any(part.lower() in name.lower() for part in args.names)
            if asked or (not args.names and not rows[name]):
                rows[name] = rows_of(name, in_own_process(name, args, cache), codegen=not args.no_codegen)
                write(args.json, [row for of_trial in rows.values() for row in of_trial], commands)
                print_columns(COLUMNS, map(cells, rows[name]))


if __name__ == "__main__":
    main()
