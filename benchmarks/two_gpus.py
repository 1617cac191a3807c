"""All measurements with two GPUs of one machine, each part by its own script, and the tables of the docs.

- ddp: `ddp.py`, ResNet-50 at four batch sizes, and DDP's options at the first of them;
- fsdp2: `fsdp2.py`, a transformer of a billion parameters;
- warm_start: `warm_start.py`, two ranks with one cache folder;
- faults: `rank_faults.py`, a rank that fails or is slow to compile, and SIGTERM.

Each part writes PART.json in the folder --output after each row. After --budget-seconds, a part starts no further row;
60 s later it is killed. Two calls of nine minutes:

    python benchmarks/two_gpus.py --output two_gpus --part ddp --batch-sizes 256 1024 128 --budget-seconds 480
    python benchmarks/two_gpus.py --output two_gpus --part faults fsdp2 warm_start
    python benchmarks/two_gpus.py --output two_gpus --part ddp --tiny --device cpu        # to try the script
    python benchmarks/two_gpus.py --from-json two_gpus                                    # prints the tables

With --results benchmarks/results --page docs/project/benchmarks_h200.md, the last command also writes the rows of the
measured parts, and replaces the sections of these parts on the page, which are between two comments.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import ddp
import fsdp2
import rank_faults
import warm_start
from tables import Row, parser_for, print_columns, print_environment, say

SECTIONS = {
    "ddp": """## ResNet-50 under DDP

The runs use NCCL and two GPUs of one machine. *batch size* is the number of images per GPU. *by hand* is
`torch.compile` in the same mode, and *options* is an option of DDP or of Dynamo that differs from the other rows. *gpu
busy* is the share of a step in which kernels other than NCCL's run. *exposed all reduce ms* is the time of a step in
which NCCL's kernels run alone.
""",
    "fsdp2": """## A billion parameters under FSDP2

The model has 28 blocks of width 1,536. Each process gets 12 sequences of 2,048 tokens, in bf16 and mode `default`.
Eager runs before and after the compiled run. *losses apart* is the largest difference from the losses of the first row.
""",
    "warm_start": """## Warm start of two ranks

The model is a ResNet-18 for images of 32x32 pixels. *seconds* is the duration of the slower rank's first compiled step,
in new processes: the median of *samples* runs. The rows compare `cache_dir` with torch's own cache folders, which are
set by hand. *cold* is a run with an empty folder, and *warm* is a run with the folder of an earlier run.
""",
    "faults": """## Faults of a rank

On the second rank, Inductor raises (*failure*), or the first compile takes longer than on the first rank (*slow*). In
*sigterm*, both ranks receive the signal during their first compile. *loss difference* is the largest relative
difference of a loss from the eager run.
""",
}
BUDGETS = {"ddp": 480, "fsdp2": 120, "warm_start": 220, "faults": 160}  # seconds
GRACE_SECONDS = 60
MARK = "TWO_GPUS_PART"  # an environment variable by which the processes of a part are found
# Without lists: the test of benchmarks/results wants each number of a file in the docs.
COLUMNS = {
    "ddp": ddp.COLUMNS,
    "fsdp2": fsdp2.COLUMNS,
    "warm_start": {name: form for name, form in warm_start.COLUMNS.items() if name != "rank_seconds"},
    "faults": rank_faults.COLUMNS,
}


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
    elif part == "warm_start":
        pairs = ["--pairs", "1", "--warm-runs", "1" if args.tiny else "3", "--no-moved"]
        options = [*budget, "--ranks", "2", *pairs]
    else:
        delays = ["--delay", "30", "--timeout", "5", "--run-seconds", "240"] if args.tiny else ["--run-seconds", "150"]
        options = ["--mode", args.mode, *delays]
    script = "rank_faults" if part == "faults" else part
    written = ["--json", str(args.output / f"{part}.json")]
    return [sys.executable, str(here / f"{script}.py"), "--device", args.device, *options, *written]


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


def section(part: str, result: dict[str, Any]) -> str:
    """The section of the docs for a part."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print(f"{SECTIONS[part]}\n```sh\n{result['command']}\n```\n")
        print_environment(result)
        print_columns(COLUMNS[part], result["rows"])
        for row in result["rows"]:
            if row.get("failure"):
                print(f"- {row['way']} {row['options']}, batch {row['batch_size']}: {row['failure']}")
    return printed.getvalue().rstrip() + "\n"


def report(folder: Path, results: Path | None = None, page: Path | None = None) -> None:
    """Print the sections of the measured parts, and write them and their rounded rows."""
    for part in SECTIONS:
        path = folder / f"{part}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        text = section(part, result)
        print(text)
        if page is not None:
            begin, end = f"<!-- two_gpus.py: {part} -->\n", f"<!-- end of {part} -->\n"
            before, rest = page.read_text().split(begin)
            _, after = rest.split(end)
            page.write_text(f"{before}{begin}\n{text}\n{end}{after}")
        if results is not None:
            rows = [{name: rounded(row, name, form) for name, form in COLUMNS[part].items()} for row in result["rows"]]
            lines = ",\n  ".join(json.dumps(row) for row in rows)
            head = json.dumps({**result, "rows": []}, indent=1).replace('"rows": []', f'"rows": [\n  {lines}\n ]')
            (results / f"{'rank_faults' if part == 'faults' else part}.json").write_text(head + "\n")


def rounded(row: Row, name: str, form: str) -> float | str | None:
    """A value as the table shows it."""
    value = row.get(name)
    if value is None or isinstance(value, bool | str):
        return None if value is None else str(value)
    number = float(re.sub("[,x]", "", form.format(value)))
    return int(number) if number.is_integer() else number


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--part", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    add("--output", type=Path, default=Path("two_gpus"), help="the folder of the JSON files")
    add("--budget-seconds", type=float, help=f"of each part; by default {BUDGETS}")
    add("--mode", default="default")
    add("--batch-sizes", type=int, nargs="+", help="of the part ddp")
    add("--options", nargs="*", choices=list(ddp.OPTIONS), help="of the part ddp")
    add("--tiny", action="store_true", help="tiny models and short delays, to try the script on a CPU")
    add("--from-json", type=Path, metavar="FOLDER", help="measure nothing, print the tables of this folder")
    add("--results", type=Path, metavar="FOLDER", help="with --from-json: write the rounded rows to this folder")
    add("--page", type=Path, metavar="FILE", help="with --from-json: replace the sections of this page of the docs")
    args = parser.parse_args()
    if args.from_json:
        report(args.from_json, args.results, args.page)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the part too
    args.output.mkdir(parents=True, exist_ok=True)
    ended_well = [measure(part, args) for part in args.part]
    report(args.output)
    sys.exit(0 if all(ended_well) else 1)


if __name__ == "__main__":
    main()
