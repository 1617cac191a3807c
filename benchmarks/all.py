"""Every table that needs a GPU, each by its own script, in calls of limited time.

python benchmarks/all.py --output FOLDER [--gpus 1] [--tables NAME ...] [--seconds 580] [--list]

A call runs the tables in their order, as many at the same time as the --gpus allow. Each table has its own GPUs and the
same share of the cores. A table starts only if its estimated duration fits into the rest of --seconds. A table that is
in the folder --output is not run again, so the next call runs the other tables. Each script writes its rows as it
measures them, into FOLDER/NAME.json.part, which becomes FOLDER/NAME.json when the script has ended. A table that does
not end in time stays a part. FOLDER/NAME.log has the output of the script.

Each file names the commit, the device, the versions, the date and the command. A copy of the files that is no clone
needs the variable COMMIT. To try the scripts on a CPU: ``--tables memory -- --device cpu --tiny``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import say

WAYS = " --ways eager default reduce-overhead bare"
ROWS = {  # more ways for some models
    ("efficientnet_b0", 64): f"{WAYS} graph", ("bert", 16): "", ("resnet50", 16): f"{WAYS} graph",
    ("convnext_tiny", 32): "", ("gpt2", 8): f"{WAYS} auto", ("resnet50", 128): f"{WAYS} auto",
    ("unet", 16): f"{WAYS} auto", ("vit_b_16", 32): "",
}  # fmt: skip
BACKGROUND = "background.py --image-size 224 --steady-steps 200 --ways eager 'by hand' background"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A table: the command that measures it, the seconds that the command takes, and the number of GPUs."""

    command: str
    seconds: int
    gpus: int = 1


TABLES = {
    "ddp": Table("ddp.py --gpus 2 --batch-sizes 128 --rounds 5 --budget-seconds 190", 210, gpus=2),
    "ddp_reduce_overhead": Table(
        "ddp.py --gpus 2 --batch-sizes 128 --mode reduce-overhead --rounds 5 --budget-seconds 190",
        210,
        gpus=2,
    ),
    "fsdp2": Table("fsdp2.py --steps 18", 90, gpus=2),
    **{
        f"duel_{model}_{size}": Table(f"duels.py --model {model} --batch-size {size}{more}", 130)
        for (model, size), more in ROWS.items()
    },
    "inference": Table("inference.py", 330),
    "background_resnet50_16": Table(f"{BACKGROUND} --model resnet50 --batch-size 16 --mode reduce-overhead", 200),
    "background_resnet50_128": Table(f"{BACKGROUND} --model resnet50 --batch-size 128 --mode default", 200),
    # A model that `default` makes slower.
    "background_slower": Table(f"{BACKGROUND} --model mobilenet_v3_large --batch-size 16", 240),
    "memory": Table("memory.py", 300),
    **{
        f"memory_{model}_{size}": Table(f"memory.py --model {model} --batch-size {size} --steps 400", 120)
        for model, size in ROWS
    },
}


class Running:
    """A script that runs, on some of the GPUs."""

    def __init__(self, name: str, gpus: list[int], of: int, output: Path, more: Sequence[str]) -> None:
        self.name, self.gpus, self._began = name, gpus, time.perf_counter()
        self._part, self._file = output / f"{name}.json.part", output / f"{name}.json"
        script, *options = shlex.split(TABLES[name].command)
        command = [sys.executable, str(HERE / script), *options, *more, "--json", str(self._part)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(of)))).split(",")
        devices = {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] for gpu in gpus)}
        with (output / f"{name}.log").open("w") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **devices}, stdout=log, stderr=log, start_new_session=True
            )
        cores = sorted(os.sched_getaffinity(0))
        mine = {core for number, core in enumerate(cores) if number * of // len(cores) in gpus}
        os.sched_setaffinity(self._process.pid, mine or cores)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Stop the script if it still runs, and keep its file if it has ended well."""
        if not self.has_ended():
            self._process.terminate()  # a script with several ranks ends them
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        say(f"{self.name}: status {status} after {time.perf_counter() - self._began:.0f} s on GPU {self.gpus}")
        if status == 0 and self._part.exists():
            self._part.rename(self._file)


def run(names: list[str], gpus: int, seconds: float, output: Path, more: Sequence[str]) -> None:
    """Run tables until all have ended, or until the time is used up."""
    ends, free, running = time.perf_counter() + seconds, list(range(gpus)), list[Running]()
    try:
        while True:
            left = ends - time.perf_counter()
            for script in [script for script in running if script.has_ended()]:
                script.end()
                running.remove(script)
                free = sorted(free + script.gpus)
            for name in list(names):
                if TABLES[name].gpus <= len(free) and TABLES[name].seconds <= left:
                    mine, free = free[: TABLES[name].gpus], free[TABLES[name].gpus :]
                    names.remove(name)
                    running.append(Running(name, mine, gpus, output, more))
            if not running or left < 0:
                break
            time.sleep(0.2)
    finally:
        for script in running:
            script.end()


def main() -> None:
    """Run the tables that are not measured yet and fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=580.0, help="end within this time")
    parser.add_argument("--list", action="store_true", help="run nothing, and print the missing tables")
    parser.add_argument("more", nargs="*", help="options for each script, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the scripts too
    args.output.mkdir(parents=True, exist_ok=True)
    missing = [name for name in args.tables if not (args.output / f"{name}.json").exists()]
    if not args.list:
        run(list(missing), args.gpus, args.seconds, args.output, args.more)
        missing = [name for name in missing if not (args.output / f"{name}.json").exists()]
    for name in missing:
        say(f"{name}: missing, about {TABLES[name].seconds} s on {TABLES[name].gpus} GPU")
    commits = {json.loads(file.read_text()).get("commit") for file in args.output.glob("*.json")}
    if len(commits) > 1:
        say(f"these files are of several commits: {commits}")


if __name__ == "__main__":
    main()
