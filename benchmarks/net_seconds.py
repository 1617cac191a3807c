"""Net seconds saved as the report counts them, against a stopwatch around two whole runs of `Trainer.fit`.

python benchmarks/net_seconds.py [--pairs 3] [--steps 300] [--json FILE]

Each pair is one run without the callback and one with `InductorCompile(train_mode="default", infer_mode=None)`, both
cold: each run is a new process with an empty compiler cache, and the order alternates. The stopwatch starts before
`Trainer.fit` and stops after it. "measured" is the eager run's time minus the compiled run's, "reported" is the
report's `net_seconds_saved`, and "error" is their difference as a share of the eager run's time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

from models import make
from tables import Row, parser_for, print_columns, save, say
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile

COLUMNS = {
    "pair": "{}", "eager_run_seconds": "{:.1f}", "compiled_run_seconds": "{:.1f}", "compile_seconds": "{:.1f}",
    "measured": "{:+.1f}", "reported": "{:+.1f}", "error": "{:+.3f}",
}  # fmt: skip


def run(compiled: bool, model: str, batch_size: int, image_size: int, steps: int, device: str) -> Row:
    """Train once in this process; returns the duration of `Trainer.fit`, and what the report says."""
    warnings.simplefilter("ignore")
    net, images, labels = make(model, batch_size, image_size, device)
    ours = InductorCompile(train_mode="default", infer_mode=None)
    trainer = make_trainer(device, *([ours] if compiled else []))
    data = loader([(images, labels)], steps)
    started = time.perf_counter()
    trainer.fit(Classifier(net), data)
    synchronize()
    row = {"seconds": time.perf_counter() - started}
    if compiled:
        report = ours.report.train
        row |= {"reported": report.net_seconds_saved, "compile_seconds": report.compile_seconds}
    return row


def run_in_new_process(*arguments: object) -> Row:
    with tempfile.TemporaryDirectory() as cache:
        variables = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
        command = [sys.executable, __file__, "--run", json.dumps(arguments)]
        printed = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(printed.decode().splitlines()[-1])


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--pairs", type=int, default=3)
    add("--steps", type=int, default=300)
    add("--model", default="blocks-2")
    add("--batch-size", type=int, default=8)
    add("--image-size", type=int, default=32)
    add("--run", type=json.loads, help="the arguments of one run, as JSON; used by the script itself")
    args = parser.parse_args()
    if args.run is not None:
        print(json.dumps(run(*args.run)))
        return
    rows: list[Row] = []
    workload = (args.model, args.batch_size, args.image_size, args.steps, args.device)
    for pair in range(args.pairs):
        order = (False, True) if pair % 2 == 0 else (True, False)
        runs = {compiled: run_in_new_process(compiled, *workload) for compiled in order}
        eager_seconds, compiled_seconds = runs[False]["seconds"], runs[True]["seconds"]
        measured, reported = eager_seconds - compiled_seconds, runs[True]["reported"]
        row = {"pair": pair, "model": args.model, "batch_size": args.batch_size, "phase": "train"}
        row |= {"eager_run_seconds": eager_seconds, "compiled_run_seconds": compiled_seconds}
        row |= {"compile_seconds": runs[True]["compile_seconds"], "measured": measured, "reported": reported}
        row["error"] = None if reported is None else (reported - measured) / eager_seconds
        rows.append(row)
        say(str(row))
        save(args.json, "Net seconds saved against a stopwatch", rows)
    print_columns(COLUMNS, rows)
    errors = [row["error"] for row in rows if row["error"] is not None]
    if errors:
        print(f"median error: {statistics.median(errors):+.3f} of the eager run")


if __name__ == "__main__":
    main()
