"""All measurements with two GPUs of one machine, each part by its own script, in calls of limited time.

- ddp: `ddp.py`, ResNet-50 at four batch sizes, and DDP's options at the first of them;
- fsdp2: `fsdp2.py`, a transformer of a billion parameters;
- warm_ranks: `warm_start.py`, two ranks with one cache folder;
- faults: `rank_faults.py`, a rank that fails or is slow to compile, and SIGTERM.

Each part writes PART.json in the folder --output after each row; `pages.py` shows these files. After --budget-seconds,
a part starts no further row; 60 s later it is killed. Two calls of nine minutes:

    python benchmarks/two_gpus.py --output two_gpus --part ddp --batch-sizes 256 1024 128 --budget-seconds 480
    python benchmarks/two_gpus.py --output two_gpus --part faults fsdp2 warm_ranks
    python benchmarks/two_gpus.py --output two_gpus --part ddp --tiny --device cpu        # to try the script
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import ddp
import rank_faults
from tables import parser_for, say

BUDGETS = {"ddp": 480, "fsdp2": 120, "warm_ranks": 220, "faults": 160}  # seconds
GRACE_SECONDS = 60
MARK = "TWO_GPUS_PART"  # an environment variable by which the processes of a part are found
SCRIPTS = {"faults": "rank_faults", "warm_ranks": "warm_start"}


def command(part: str, args: Namespace) -> list[str]:
    """The command of a part."""
    here, budget = Path(__file__).parent, ["--budget-seconds", str(args.budget_seconds or BUDGETS[part])]
    if part == "ddp":
        tiny = ["--model", "blocks-1", "--steps", "4", "--block", "1"]
        sizes = args.batch_sizes or ([2] if args.tiny else None)
        options = [*budget, "--mode", args.mode, *(tiny if args.tiny else [])]
        options += ["--batch-sizes", *map(str, sizes)] if sizes else []
        options += ["--options", *args.options] if args.options is not None else []
    elif part == "fsdp2":
        options = ["--steps", "8", "--tiny"] if args.tiny else ["--steps", "18"]
    elif part == "warm_ranks":
        pairs = ["--pairs", "1", "--warm-runs", "1" if args.tiny else "3", "--no-moved"]
        options = [*budget, "--ranks", "2", *pairs]
    else:
        delays = ["--delay", "30", "--timeout", "5", "--run-seconds", "240"] if args.tiny else ["--run-seconds", "150"]
        options = ["--mode", args.mode, *delays]
    written = ["--json", str(args.output / f"{part}.json")]
    return [sys.executable, str(here / f"{SCRIPTS.get(part, part)}.py"), "--device", args.device, *options, *written]


def measure(part: str, args: Namespace) -> bool:
    """Run a part; returns whether it ended well."""
    began, longest = time.monotonic(), (args.budget_seconds or BUDGETS[part]) + GRACE_SECONDS
    say(f"{part}: {' '.join(command(part, args)[1:])}")
    mark = {MARK: f"{os.getpid()}-{part}"}
    process = subprocess.Popen(command(part, args), env={**os.environ, **mark}, stdout=subprocess.DEVNULL)
    try:
        process.wait(longest)
    except subprocess.TimeoutExpired:
        say(f"{part}: killed after {longest:.0f} s")
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        rank_faults.kill(f"{MARK}={mark[MARK]}")
        process.wait()
    say(f"{part}: exit code {process.returncode} after {time.monotonic() - began:.0f} s")
    return process.returncode == 0


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=list(BUDGETS), default=list(BUDGETS))
    add("--output", type=Path, default=Path("two_gpus"), help="the folder of the JSON files")
    add("--budget-seconds", type=float, help=f"of each part; by default {BUDGETS}")
    add("--mode", default="default")
    add("--batch-sizes", type=int, nargs="+", help="of the part ddp")
    add("--options", nargs="*", choices=list(ddp.OPTIONS), help="of the part ddp")
    add("--tiny", action="store_true", help="tiny models and short delays, to try the script on a CPU")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the part too
    args.output.mkdir(parents=True, exist_ok=True)
    ended_well = [measure(part, args) for part in args.part]
    sys.exit(0 if all(ended_well) else 1)


if __name__ == "__main__":
    main()
