"""ResNet-50 training in Lightning under DDP on several GPUs: step times and throughput.

The ways:

- eager: not compiled;
- by hand: `module.net.compile(mode=MODE)`; Dynamo splits the graphs at DDP's buckets, so that DDP reduces gradients
  while the remaining backward graphs run;
- ours: `InductorCompile(MODE)` keeps graphs whole; DDP reduces the gradients after the backward pass.

The ways run in turn, as often as --rounds says, without a way that failed. Processes stay alive from row to row. Every
process has the same batch on its device in each step. Times are medians of blocks of steps, synchronized at both ends,
in the second half of the steps.

python benchmarks/ddp.py [--gpus 2] [--batch-sizes 128] [--rounds 5] [--mode default] [--json FILE]
python benchmarks/ddp.py --device cpu --model resnet18 --batch-sizes 2 --image-size 32 --steps 4 --block 1
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from models import make
from tables import Row, parser_for, print_columns, save, say, summarize
from trainer import BlockClock, Classifier, loader, make_trainer

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import environment

EAGER, BY_HAND, OURS = WAYS = ("eager", "by hand", "ours")
COLUMNS = {
    "batch_size": "{}", "gpus": "{}", "way": "{}", "mode": "{}", "round": "{}", "step_ms": "{:.2f}",
    "spread_ms": "{:.2f}", "images_per_second": "{:.0f}", "graphs": "{}",
}  # fmt: skip


def jobs(args: argparse.Namespace) -> list[Row]:
    """The rows to measure."""
    return [
        {"gpus": args.gpus, "batch_size": size, "way": way, "mode": "" if way == EAGER else args.mode, "round": number}
        for size in args.batch_sizes
        for number in range(1, args.rounds + 1)
        for way in args.ways
    ]


# ------------------------------------------------------------------------------------------ in a rank


def train(job: Row, args: argparse.Namespace) -> Row:
    """One fit in this process, which is one of ``job["gpus"]``."""
    torch._dynamo.reset()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else "cpu"
    net, images, labels = make(args.model, job["batch_size"], args.image_size, device)
    module, clock = Classifier(net), BlockClock(args.block)
    callbacks, ours = [clock], InductorCompile(args.mode, None, baseline_steps=0, verify="off")
    if job["way"] == OURS:
        callbacks = [ours, *callbacks]  # type: ignore[list-item]
    elif job["way"] == BY_HAND:
        module.net.compile(mode=args.mode)
    strategy = DDPStrategy(gradient_as_bucket_view=True)
    trainer = make_trainer(args.device, *callbacks, devices=job["gpus"], strategy=strategy)
    trainer.fit(module, loader([(images, labels)], args.steps))
    timed = clock.block_ms
    row = {"model": args.model, "phase": "train", **job, **summarize(timed[len(timed) // 2 :])}
    row["block_ms"] = timed
    if job["way"] == OURS:
        report = ours.report.train
        row["failures"] = [event["reason"] for event in report.diagnostics.events if event["kind"] == "fallback"]
        row |= {"compile_seconds": report.compile_seconds, "graphs": report.graphs}
    return row


def serve(args: argparse.Namespace) -> None:
    """Measure jobs as they arrive in the folder, until the process that sends them ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the rank ends with torchrun, also within a step
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    number = 0
    while Path(f"/proc/{args.sender}").exists():
        path = args.serve / f"job_{number}.json"
        if not path.exists():
            time.sleep(0.02)
            continue
        try:
            row = train(json.loads(path.read_text()), args)
        except Exception as error:
            traceback.print_exc()
            row = {"failure": f"{type(error).__name__}: {str(error)[:300]}"}
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
        write(args.serve / f"row_{number}.{os.environ['LOCAL_RANK']}.json", row | {"environment": environment()})
        number += 1


def write(path: Path, content: Any) -> None:
    """Write a file that appears when it is complete."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


# ------------------------------------------------------------------------------------------ seen from outside


class RankProcesses:
    """The processes, one for each GPU, which measure one job after the other."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args = folder, args
        self.process: subprocess.Popen[bytes] | None = None
        self.sent = 0

    def start(self) -> None:
        self.inbox = Path(tempfile.mkdtemp(dir=self.folder))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.args.gpus)]
        sender = ["--serve", str(self.inbox), "--sender", str(os.getpid())]
        command = [sys.executable, *torchrun, __file__, *sys.argv[1:], *sender]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        self.sent = 0

    def measure(self, job: Row) -> Row:
        """The row of a job; if it takes too long, the processes end, and the next job starts new ones."""
        if self.process is None:
            self.start()
        write(self.inbox / f"job_{self.sent}.json", job)
        written = [self.inbox / f"row_{self.sent}.{rank}.json" for rank in range(self.args.gpus)]
        self.sent += 1
        deadline, failure = time.monotonic() + self.args.row_seconds, None
        while not all(path.exists() for path in written) and failure is None:
            time.sleep(0.05)
            if self.process.poll() is not None:
                failure = f"the processes ended with exit code {self.process.returncode}"
            elif time.monotonic() > deadline:
                failure = f"took longer than {self.args.row_seconds:.0f} s"
            elif any("failure" in json.loads(path.read_text()) for path in written if path.exists()):
                failure = "failed on one rank"  # the others may wait for it
        ranks = [json.loads(path.read_text()) for path in written if path.exists()]
        if failure is not None or any("failure" in row for row in ranks):
            self.end()
            failures = [row["failure"] for row in ranks if "failure" in row]
            return {"model": self.args.model, "phase": "train", **job, "failure": (failures or [failure])[0]}
        row = ranks[0]
        return row | {"images_per_second": row["batch_size"] * row["gpus"] / row["step_ms"] * 1000}

    def end(self) -> None:
        """Kill the processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


def rows_of(args: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Measure all jobs; start no further one when the time is used up."""
    started = time.monotonic()
    processes = RankProcesses(folder, args)
    failed = set[tuple[int, str]]()
    try:
        for job in jobs(args):
            key = job["batch_size"], job["way"]
            if key in failed:
                continue
            if args.budget_seconds is not None and time.monotonic() - started > args.budget_seconds:
                say(f"not measured, the time is used up: {job}")
                continue
            row = processes.measure(job)
            if "failure" in row:
                failed.add(key)
            yield row
    finally:
        processes.end()


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    add("--gpus", type=int, default=2, help="number of processes, each on its own GPU")
    add("--batch-sizes", type=int, nargs="+", default=[128], help="of each process")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    add("--rounds", type=int, default=1, help="of each way")
    add("--model", default="resnet50")
    add("--mode", default="default")
    add("--image-size", type=int, default=224)
    add("--steps", type=int, default=60, help="the median is that of the second half")
    add("--block", type=int, default=5, help="steps that are timed together; divides --steps")
    add("--row-seconds", type=float, default=120.0, help="a row that takes longer fails")
    add("--budget-seconds", type=float, help="start no further row after that time")
    add("--serve", type=Path, help=argparse.SUPPRESS)
    add("--sender", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the processes too
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for row in rows_of(args, Path(folder)):
            found = row.pop("environment", None)
            rows.append(row)
            say(str({name: value for name, value in row.items() if name != "block_ms"}))
            save(args.json, f"{args.model} under DDP, mode {args.mode}", rows, found)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
