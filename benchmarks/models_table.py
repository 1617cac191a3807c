"""Train small models of other packages eagerly and with the callback, and write how the two runs compare.

    .venv-models/bin/python benchmarks/models_table.py --json build/models.json [--no-codegen] [NAME ...]

With ``--no-codegen``, Inductor calls torch's own kernels: graphs and recompiles are the same, and compiling takes a
fraction of the time. Compile seconds and step times then mean little.

Each trial of ``tests/models`` runs in a separate process.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench_measure import as_result
from tables import command_line, print_columns

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
        command = [sys.executable, __file__, "--json", file.name, "--one", name, *how]
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
    return {
        **{name: row[name] for name in ("model", "phase", "graphs", "recompiles", "frames", "result")},
        "breaks": row["graph_breaks"],
        "traces": row["traces_of_a_frame"],
        "compile s": row["compile_seconds"],
        "step ms": f"{row['eager_ms']} → {row['compiled_ms']}" if row["eager_ms"] else None,
        "run s": f"{row['eager_run_seconds']} → {row['compiled_run_seconds']}",
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print_columns(COLUMNS, map(cells, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only the trials whose names have one of these parts")
    parser.add_argument("--json", type=Path, help="the file of the rows")
    parser.add_argument("--no-codegen", action="store_true", help="compile in a fraction of the time, without kernels")
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
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        for name in trials():
            if not args.names or any(part.lower() in name.lower() for part in args.names):
                measured = rows_of(name, in_own_process(name, args, cache), codegen=not args.no_codegen)
                show(measured)
                rows += measured
                if args.json is not None:
                    result = as_result(TITLE, rows, command_line())
                    packages = {package: version(package) for package in PACKAGES}
                    args.json.write_text(json.dumps({**result, "packages": packages}, indent=1) + "\n")


if __name__ == "__main__":
    main()
