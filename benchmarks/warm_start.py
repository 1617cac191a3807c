"""The warm start of a Trainer run with `cache_dir`, against torch's own cache folder by hand: ResNet-18 at 32x32.

Each run is a new process, or with --ranks one for each rank. The figure is the wall time of the first training step
that captures a graph, from `on_train_batch_start` to `on_train_batch_end`, of the slowest rank; the table has the
medians. --warm-runs measures the warm start more than once in each pair, with alternating order.

- library: `InductorCompile(targets=["net"], verify="off", baseline_steps=0, cache_dir=FOLDER)`, with an empty folder
  (cold), the folder of the cold run (warm), and the same folder at another path (moved);
- by hand: `module.net.compile()`, with TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR set to a folder.

python benchmarks/warm_start.py [--pairs 3] [--ranks 2] [--json FILE]
python benchmarks/warm_start.py --device cuda --ranks 2 --pairs 1 --warm-runs 3 --no-moved
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
from models import make
from tables import Row, parser_for, print_columns, save, say
from torch._dynamo.utils import counters
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import environment

LIBRARY, BY_HAND = "library", "by hand"
COLUMNS = {
    "way": "{}", "seconds": "{:.2f}", "samples": "{}", "of_cold": "{:.2f}", "of_by_hand": "{:.2f}",
    "rank_seconds": "{}",
}  # fmt: skip


class FirstCompiledStep(pl.Callback):
    """Times the first step that captures a graph."""

    seconds: float | None = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.graphs, self.started = counters["stats"]["unique_graphs"], time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        synchronize()
        if self.seconds is None and counters["stats"]["unique_graphs"] > self.graphs:
            self.seconds = time.perf_counter() - self.started


def train(way: str, folder: str, out: Path, ranks: int, device: str) -> None:
    """One run in this process, which may be one of several ranks; writes the seconds to a file."""
    warnings.simplefilter("ignore")
    rank = os.environ.get("LOCAL_RANK", "0")
    net, images, labels = make("resnet18", 16, 32, f"cuda:{rank}" if device == "cuda" else "cpu")
    module, clock = Classifier(net), FirstCompiledStep()
    callbacks: list[pl.Callback] = [clock]
    if way == BY_HAND:
        module.net.compile()
    else:
        callbacks.append(InductorCompile(targets=["net"], verify="off", baseline_steps=0, cache_dir=folder))
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = make_trainer(device, *callbacks, num_sanity_val_steps=0, devices=ranks, strategy=strategy)
    trainer.fit(module, loader([(images, labels)], 3))
    if clock.seconds is None:
        raise SystemExit("no step captured a graph")
    (out / f"rank_{trainer.global_rank}").write_text(json.dumps([clock.seconds, environment()]))


def run(way: str, folder: Path, args: argparse.Namespace) -> list[float]:
    """One run in new processes with ``folder`` as its cache; returns the seconds of each rank."""
    ranks = args.ranks
    machine = folder.parent / "tmp"  # torch keeps precompiled C++ headers in the folder for temporary files
    machine.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment["TMPDIR"] = str(machine)
    if way == BY_HAND:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as out:
        options = ["--child", way, str(folder), out, "--ranks", str(ranks), "--device", args.device]
        command = [sys.executable, *torchrun, __file__, *options]
        if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode:
            raise SystemExit(f"this run failed: {command}")
        results = [json.loads(path.read_text()) for path in sorted(Path(out).glob("rank_*"))]
        args.environment = results[0][1]
        return [seconds for seconds, _ in results]


def measure(args: argparse.Namespace) -> Iterator[tuple[str, list[float]]]:
    """The name of each run and the seconds of its ranks, pair by pair; library and by hand change their order."""
    for number in range(args.pairs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
            folders = {way: Path(top, way.replace(" ", "_"), "cache") for way in (LIBRARY, BY_HAND)}
            for folder in folders.values():
                folder.mkdir(mode=0o700, parents=True)
            ways = [BY_HAND, LIBRARY] if number % 2 else [LIBRARY, BY_HAND]
            for state in ("cold", *["warm"] * args.warm_runs):
                for way in ways:
                    yield f"{way}, {state}", run(way, folders[way], args)
                ways.reverse()
            if args.moved:
                moved = Path(shutil.move(folders[LIBRARY], folders[LIBRARY].with_name("moved")))
                yield f"{LIBRARY}, moved", run(LIBRARY, moved, args)


def rows_of(runs: dict[str, list[list[float]]]) -> list[Row]:
    """The medians over the runs of each name, of the slowest rank."""
    medians = {name: statistics.median(max(ranks) for ranks in of_name) for name, of_name in runs.items()}
    rows = []
    for name, median in medians.items():
        cold = medians.get(f"{name.split(', ')[0]}, cold", medians[f"{LIBRARY}, cold"])
        by_hand = medians.get(f"{BY_HAND}, {'cold' if name.endswith('cold') else 'warm'}")
        row = {"way": name, "seconds": median, "samples": len(runs[name]), "of_cold": median / cold}
        row |= {"of_by_hand": median / by_hand if by_hand else None}
        rows.append(row | {"rank_seconds": [[round(s, 2) for s in ranks] for ranks in runs[name]]})
    return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run under DDP (gloo)")
    parser.add_argument("--warm-runs", type=int, default=1, help="of each way in each pair")
    moved = "also with the folder at another path"
    parser.add_argument("--moved", action=argparse.BooleanOptionalAction, default=True, help=moved)
    parser.add_argument("--budget-seconds", type=float, help="start no further run after that time")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, folder, out = args.child
        train(way, folder, Path(out), args.ranks, args.device)
        return
    started, runs = time.monotonic(), {}
    title = f"First compiled step of ResNet-18 at 32x32, ranks: {args.ranks}, pairs: {args.pairs}"
    for name, seconds in measure(args):
        runs.setdefault(name, []).append(seconds)
        say(f"{name}: {seconds}")
        if f"{LIBRARY}, cold" in runs:
            save(args.json, title, rows_of(runs), args.environment)
        if args.budget_seconds is not None and time.monotonic() - started > args.budget_seconds:
            say("the time is used up")
            break
    print_columns(COLUMNS, rows_of(runs))


if __name__ == "__main__":
    main()
