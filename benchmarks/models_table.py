"""Write the table of models of other packages: graphs, recompiles, compile seconds, step times and equality.

    .venv-models/bin/python benchmarks/models_table.py build/models.json [--no-codegen] [NAME ...]

With ``--no-codegen``, Inductor calls torch's own kernels: graphs and recompiles are the same, and compiling takes a
fraction of the time. Compile seconds and step times then mean little.

Each trial of ``tests/models`` runs in a process of its own. A trial that is in the file already is run again only if
its name, or a part of it, is given.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAMILIES = ("test_loops", "test_graphs", "test_transformers", "test_vision", "test_forecasting")
PACKAGES = (
    "torch", "lightning", "lightly", "monai", "neuralforecast", "peft", "pytorch-forecasting",
    "segmentation-models-pytorch", "timm", "torch-geometric", "torchvision", "transformers",
)  # fmt: skip
LIMIT_SECONDS = 400


def trials() -> dict[str, tuple[str, object]]:
    sys.path.insert(0, str(ROOT))
    found: dict[str, tuple[str, object]] = {}
    for family in FAMILIES:
        module = importlib.import_module(f"tests.models.{family}")
        found |= {trial.name: (family, trial) for trial in module.TRIALS}
        if hasattr(module, "neuralforecast_figures"):
            found["neuralforecast NHITS"] = family, module.neuralforecast_figures
    return found


def one(name: str) -> dict[str, object]:
    import torch

    from tests.models.trial import Trial, figures

    _, trial = trials()[name]
    if os.environ.get("MODELS_TABLE_NO_CODEGEN"):
        import torch._inductor.config

        torch._inductor.config.fallback_by_default = True
    torch.compile(lambda x: x + 1)(torch.ones(3))  # the process's first compile builds a C++ header for seconds
    torch.compiler.reset()
    return figures(trial) if isinstance(trial, Trial) else trial()  # type: ignore[operator]


def in_own_process(name: str, cache: str) -> dict[str, object]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    environment["OMP_NUM_THREADS"] = "1"  # models this small, and other work on the machine
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, __file__, "--one", name, file.name]
        began = time.perf_counter()
        try:
            done = subprocess.run(
                command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {LIMIT_SECONDS} s"}
        if done.returncode or not Path(file.name).read_text():
            return {"failed": (done.stderr or done.stdout)[-1500:]}
        return {**json.loads(Path(file.name).read_text()), "all_seconds": round(time.perf_counter() - began)}


def line(name: str, row: dict) -> str:
    if "failed" in row:
        return f"{name:36} failed: {row['failed'].strip().splitlines()[-1][:120]}"
    parts = []
    for phase in ("train", "infer"):
        p = row[phase]
        parts.append(
            f"{phase} {p['graphs']} graphs {p['recompiles']} recompiles {p['graph_breaks']} breaks "
            f"{p['compile_seconds']} s, {p['eager_ms']} -> {p['compiled_ms']} ms"
        )
    total = row["seconds"]
    return f"{name:36} {' | '.join(parts)} | run {total['eager']} -> {total['compiled']} s | equal {row['equal']}"


def main() -> None:
    if sys.argv[1] == "--one":
        try:
            row = one(sys.argv[2])
        except Exception as error:
            traceback.print_exc()
            row = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        Path(sys.argv[3]).write_text(json.dumps(row))
        return
    path, wanted = Path(sys.argv[1]), [word for word in sys.argv[2:] if word != "--no-codegen"]
    if "--no-codegen" in sys.argv:
        os.environ["MODELS_TABLE_NO_CODEGEN"] = "1"
    table = json.loads(path.read_text()) if path.exists() else {"rows": {}}
    table["versions"] = {package: version(package) for package in PACKAGES}
    table["codegen"] = "MODELS_TABLE_NO_CODEGEN" not in os.environ
    table["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    with tempfile.TemporaryDirectory() as cache:
        for name in trials():
            asked = any(part.lower() in name.lower() for part in wanted)
            if asked or (not wanted and name not in table["rows"]):
                table["rows"][name] = in_own_process(name, cache)
                path.write_text(json.dumps(table, indent=1) + "\n")
            if name in table["rows"]:
                print(line(name, table["rows"][name]), flush=True)


if __name__ == "__main__":
    main()
