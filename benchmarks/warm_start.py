"""The warm start of a Trainer run with `cache_dir`, against torch's own cache folder by hand: ResNet-18 on the CPU.

Each run is a new process. The figure is the wall time of the first training step that captures a graph, from
`on_train_batch_start` to `on_train_batch_end`; the table has the medians of --pairs pairs.

- library: `InductorCompile(targets=["net"], verify="off", baseline_steps=0, cache_dir=FOLDER)`, with an empty folder
  (cold), the folder of the cold run (warm), and the same folder at another path (moved);
- by hand: `module.net.compile()`, with TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR set to a folder;
- default settings: `InductorCompile(cache_dir=FOLDER)`, with --default-settings;
- killed: with --kill, SIGKILL ends a process that compiles, and two more runs use its folder.

python benchmarks/warm_start.py [--pairs 3] [--default-settings] [--ranks 2] [--kill] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
from models import make
from tables import parser_for, print_columns, save, say
from torch._dynamo.utils import counters
from trainer import Classifier, loader, make_trainer

from compile_callbacks import InductorCompile

LIBRARY, BY_HAND, DEFAULT = "library", "by hand", "default settings"
COLUMNS = {"way": "{}", "seconds": "{:.2f}", "of_cold": "{:.0%}", "of_by_hand": "{:.2f}", "rank_seconds": "{}"}
KILL_SECONDS = 15.0  # after the start of the first step, unless the process writes a file before


class FirstCompiledStep(pl.Callback):
    """Times the first step that captures a graph, and creates a file when a step starts."""

    seconds: float | None = None

    def __init__(self, started_file: Path) -> None:
        self.started_file = started_file

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.started_file.touch()
        self.graphs, self.started = counters["stats"]["unique_graphs"], time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.seconds is None and counters["stats"]["unique_graphs"] > self.graphs:
            self.seconds = time.perf_counter() - self.started


def train(way: str, folder: str, out: Path, ranks: int) -> None:
    """One run in this process, which may be one of several ranks; writes the seconds to a file."""
    warnings.simplefilter("ignore")
    net, images, labels = make("resnet18", 16, 32)
    module, clock = Classifier(net), FirstCompiledStep(out / "started")
    callbacks: list[pl.Callback] = [clock]
    if way == BY_HAND:
        module.net.compile()
    else:
        settings = {} if way == DEFAULT else {"targets": ["net"], "verify": "off", "baseline_steps": 0}
        callbacks.append(InductorCompile(cache_dir=folder, **settings))
    strategy = "ddp" if ranks > 1 else "auto"
    trainer = make_trainer("cpu", *callbacks, num_sanity_val_steps=0, devices=ranks, strategy=strategy)
    trainer.fit(module, loader((images, labels), 20 if way == DEFAULT else 3))
    if clock.seconds is None:
        raise SystemExit("no step captured a graph")
    (out / f"seconds_{trainer.global_rank}").write_text(str(clock.seconds))


def run(way: str, folder: Path, ranks: int, *, kill: bool = False) -> list[float]:
    """One run in new processes with ``folder`` as its cache; returns the seconds of each rank."""
    machine = folder.parent / "tmp"  # torch keeps precompiled C++ headers in the folder for temporary files
    machine.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    environment["TMPDIR"] = str(machine)
    if way == BY_HAND:
        environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, *torchrun, __file__, "--child", way, str(folder), out, "--ranks", str(ranks)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
        if kill:
            while not Path(out, "started").exists() and process.poll() is None:
                time.sleep(0.05)
            deadline = time.perf_counter() + KILL_SECONDS
            while not any(path.is_file() for path in folder.rglob("*")) and time.perf_counter() < deadline:
                time.sleep(0.05)
            assert process.poll() is None, "the process ended before it was killed"
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() and not kill:
            raise SystemExit(f"this run failed: {command}")
        return [json.loads(path.read_text()) for path in sorted(Path(out).glob("seconds_*"))]


def measure_pair(number: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """The runs of one pair by name; the order of library and by hand changes from pair to pair."""
    seconds = {}
    states = {LIBRARY: ("cold", "warm", "moved"), BY_HAND: ("cold", "warm")}
    states = dict(reversed(states.items())) if number % 2 else states
    states |= {DEFAULT: ("cold", "warm")} if args.default_settings else {}
    states |= {"killed": ("next run", "warm")} if args.kill else {}
    for name, of_way in states.items():
        way = LIBRARY if name == "killed" else name
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as top:
            folder = Path(top, "cache")
            folder.mkdir(mode=0o700)
            if name == "killed":
                run(way, folder, args.ranks, kill=True)
            for state in of_way:
                if state == "moved":
                    folder = Path(shutil.move(folder, folder.with_name("moved")))
                seconds[f"{name}, {state}"] = run(way, folder, args.ranks)
                say(f"pair {number + 1}: {name}, {state}: {seconds[f'{name}, {state}']}")
    return seconds


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--default-settings", action="store_true")
    parser.add_argument("--ranks", type=int, default=1, help="processes of each run under DDP (gloo)")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, folder, out = args.child
        train(way, folder, Path(out), args.ranks)
        return
    pairs = [measure_pair(number, args) for number in range(args.pairs)]
    medians = {name: statistics.median(max(pair[name]) for pair in pairs) for name in pairs[0]}
    rows = []
    for name, median in medians.items():
        cold = medians.get(f"{name.split(', ')[0]}, cold", medians[f"{LIBRARY}, cold"])
        by_hand = medians[f"{BY_HAND}, {'cold' if name.endswith('cold') else 'warm'}"]
        row = {"way": name, "seconds": median, "of_cold": median / cold, "of_by_hand": median / by_hand}
        rows.append(row | {"rank_seconds": [[round(s, 2) for s in pair[name]] for pair in pairs]})
    print_columns(COLUMNS, rows)
    save(args.json, f"First compiled step of ResNet-18 at 32x32, ranks: {args.ranks}, pairs: {args.pairs}", rows)


if __name__ == "__main__":
    main()
