"""Every table with one GPU, each by its own script, in calls of limited time.

python benchmarks/all.py --output FOLDER [--tables NAME ...] [--seconds 580] [--list]

A call runs the tables in their order, and starts a table only if its estimated duration fits into the rest of
--seconds. A table that is in the folder --output is not run again, so the next call runs the other tables. Each script
writes its rows as it measures them, into FOLDER/NAME.json.part, which becomes FOLDER/NAME.json when the script has
ended. A table that does not end in time stays a part.

Each file names the commit, the device, the versions, the date and the command. A machine that has no clone, but a copy
of the files, needs the variable COMMIT.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tables import say

ORDINARY = {"vit_b_16": 150, "bert": 190, "gpt2": 160, "convnext_tiny": 210, "efficientnet_b0": 350, "unet": 110}
BACKGROUND = "background.py --image-size 224 --steady-steps 200 --ways eager 'by hand' background"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """A table: the command that measures it, and the seconds that the command takes on an H100."""

    command: str
    seconds: int


TABLES = {
    "resnet50_train": Table("resnet50.py --phase train --batch-sizes 16 128", 260),
    "resnet50_infer": Table("resnet50.py --phase infer --batch-sizes 1 128 --infer-run-steps 100000 15000", 240),
    **{f"ordinary_{name}": Table(f"ordinary.py --model {name}", seconds) for name, seconds in ORDINARY.items()},
    "background_resnet50_16": Table(f"{BACKGROUND} --model resnet50 --batch-size 16 --mode reduce-overhead", 200),
    "background_resnet50_128": Table(f"{BACKGROUND} --model resnet50 --batch-size 128 --mode default", 200),
    "background_vit": Table(f"{BACKGROUND} --model vit_b_16 --batch-size 32 --mode reduce-overhead", 180),
    "background_gpt2": Table(f"{BACKGROUND} --model gpt2 --batch-size 8 --mode default", 180),
    **{
        f"background_{name}": Table(f"{BACKGROUND} --model {name} --batch-size {size}", 150)
        for name, size in {"bert": 16, "convnext_tiny": 32, "efficientnet_b0": 64, "unet": 16}.items()
    },
    # A model that `default` makes slower.
    "background_slower": Table(f"{BACKGROUND} --model mobilenet_v3_large --batch-size 16", 150),
    "background_max_autotune": Table(f"{BACKGROUND} --model resnet50 --batch-size 16 --mode max-autotune", 560),
    "items": Table("ordinary.py --model items-8 --ways auto eager default healed hand hand-healed lightning", 200),
    "lengths": Table("ordinary.py --model blocks-6 --lengths 40", 250),
    **{f"regions_{name}": Table(f"regions.py --models {name}", 300) for name in ("1b", "3b", "8b")},
    "regions_train_1b": Table("regions.py --models 1b --train", 300),
    "regions_train_3b": Table("regions.py --models 3b --batch-sizes 1 --train", 200),
    "spiking": Table("spiking.py", 280),
    "scaling_depth": Table("scaling.py", 400),
    "memory": Table("memory.py", 240),
    "warm_start": Table("warm_start.py --pairs 1 --warm-runs 3 --no-moved", 200),
    "zoo_train": Table("zoo.py --phase train", 400),
    "zoo_infer": Table("zoo.py --phase infer", 300),
}


def run(name: str, command: Sequence[str], output: Path, seconds: float) -> None:
    """Run the script of a table, and keep its file if it ends in time."""
    part = output / f"{name}.json.part"
    started = time.perf_counter()
    try:
        status = subprocess.run(
            [sys.executable, str(HERE / command[0]), *command[1:], "--json", str(part)], timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = -1
    say(f"{name}: status {status} after {time.perf_counter() - started:.0f} s")
    if status == 0 and part.exists():
        part.rename(output / f"{name}.json")


def main() -> None:
    """Run the tables that are not measured yet and fit into the time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=580.0, help="end within this time")
    parser.add_argument("--list", action="store_true", help="run nothing, and print the missing tables")
    parser.add_argument("more", nargs="*", help="options for each script, after --")
    args = parser.parse_args()
    ends = time.perf_counter() + args.seconds
    args.output.mkdir(parents=True, exist_ok=True)
    for name in args.tables:
        if (args.output / f"{name}.json").exists():
            continue
        left = ends - time.perf_counter()
        if args.list or TABLES[name].seconds > left:
            say(f"{name}: missing, about {TABLES[name].seconds} s")
            continue
        run(name, [*shlex.split(TABLES[name].command), *args.more], args.output, left)
    commits = {json.loads(file.read_text()).get("commit") for file in args.output.glob("*.json")}
    if len(commits) > 1:
        say(f"these files are of several commits: {commits}")


if __name__ == "__main__":
    main()
