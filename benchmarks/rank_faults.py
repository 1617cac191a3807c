"""Run two ranks one of which cannot compile, compiles longer, or gets SIGTERM while it compiles.

- failure: on the second rank, Inductor raises. Its target runs eagerly; the run ends with the losses of an eager run.
- slow: the second rank compiles --delay seconds longer, and collectives time out after --timeout seconds. The run ends
  with eager's losses, or as a run that is compiled by hand ends.
- sigterm: both ranks receive SIGTERM in the middle of their first compile. They end within --end-seconds, begin no
  further compile, and leave no process behind. The backward graph of the interrupted compile is a part of it.

Each run is a torchrun of its own with an empty compiler cache, and is killed after --run-seconds. "loss_difference" is
the largest difference of a rank's training losses from those of the eager run with the same seed, in float32, divided
by the loss. "seconds" is the time of the run; after a signal, the time from the signal to the end of all processes.

python benchmarks/rank_faults.py [--delay 60] [--timeout 600] [--json FILE]
python benchmarks/rank_faults.py --device cpu --delay 8
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._inductor.graph
from lightning.pytorch.strategies import DDPStrategy
from tables import Row, parser_for, print_columns, save, say
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer import Classifier, make_trainer

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import environment

EAGER, BY_HAND, OURS = "eager", "by hand", "ours"
RUNS = [
    ("none", EAGER), ("failure", OURS), ("slow", BY_HAND), ("slow", OURS), ("sigterm", BY_HAND), ("sigterm", OURS),
]  # fmt: skip
TARGETS = ["net", "head"]
STEPS, HOLD_SECONDS, TOLERANCE = 6, 4.0, 1e-3
MARK = "RANK_FAULTS_RUN"  # an environment variable by which the processes of a run are found
COLUMNS = {
    "case": "{}", "way": "{}", "outcome": "{}", "seconds": "{:.1f}", "loss_difference": "{:.7f}",
    "compiles_after_signal": "{}", "processes_left": "{}", "passed": "{}",
}  # fmt: skip


# ------------------------------------------------------------------------------------------ in a rank


class Recorded(Classifier):
    """A small convolutional net of two targets, whose losses are written down."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(nn.Sequential(*layers))
        self.head = nn.Linear(16, 10)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.head(self.net(batch[0])), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def batches(rank: int, steps: int) -> DataLoader:
    """Other data on each rank."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(steps, 8, 3, 16, 16, generator=generator)
    labels = torch.randint(10, (steps, 8), generator=generator)
    return DataLoader(list(zip(images, labels, strict=True)), batch_size=None)


def child(args: argparse.Namespace) -> None:
    """One run in this process, which is one of two ranks."""
    warnings.simplefilter("ignore")
    (case, way), folder, rank = args.child, args.folder, int(os.environ["LOCAL_RANK"])
    torch.backends.cudnn.allow_tf32 = False
    lower, compiles = torch._inductor.graph.GraphLowering.run, []

    def run(self: Any, *arguments: Any) -> Any:
        if self.is_backward:
            return lower(self, *arguments)
        compiles.append(time.time())
        (folder / f"compiles.{rank}.json").write_text(json.dumps(compiles))
        if case == "failure" and rank == 1:
            raise RuntimeError("this lowering is not there")
        if case == "slow" and rank == 1 and len(compiles) == 1:
            time.sleep(args.delay)
        if case == "sigterm" and len(compiles) == 1:
            until = time.monotonic() + HOLD_SECONDS
            while (left := until - time.monotonic()) > 0:
                time.sleep(left)
        return lower(self, *arguments)

    module, callbacks = Recorded(), []
    if way == OURS:
        callbacks = [InductorCompile(args.mode, None, targets=TARGETS, baseline_steps=0)]
    elif way == BY_HAND:
        for name in TARGETS:
            setattr(module, name, torch.compile(getattr(module, name), mode=args.mode))
    patience = args.timeout if case == "slow" else 120.0
    strategy = DDPStrategy(timeout=dt.timedelta(seconds=patience))
    trainer = make_trainer(args.device, *callbacks, devices=2, strategy=strategy, precision="32-true")
    (folder / f"pid.{rank}").write_text(str(os.getpid()))
    with mock.patch.object(torch._inductor.graph.GraphLowering, "run", run):
        trainer.fit(module, batches(rank, 50 if case == "sigterm" else STEPS))
    result = {"losses": module.losses, "environment": environment()}
    if callbacks:
        result["fallbacks"] = callbacks[0].report.train.fallbacks
    (folder / f"result.{rank}.json").write_text(json.dumps(result))
    torch.distributed.destroy_process_group()


# ------------------------------------------------------------------------------------------ seen from outside


def processes(mark: str) -> list[int]:
    """The processes that were started with a text in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark.encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def kill(mark: str) -> None:
    """Kill the processes that were started with a text in their environment."""
    for pid in processes(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read(folder: Path, name: str) -> list[Any]:
    """The files of both ranks; fewer if a rank wrote none."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}.*.json"))]


def measure(case: str, way: str, args: argparse.Namespace) -> Row:
    """One run of two ranks, seen from outside."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder, mark = Path(name), f"{MARK}={name}"
        variables = {MARK: name, "TORCHINDUCTOR_CACHE_DIR": f"{name}/inductor", "TRITON_CACHE_DIR": f"{name}/triton"}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options = [*sys.argv[1:], "--child", case, way, "--folder", name]
        began = time.monotonic()
        with (folder / "printed").open("w") as printed:
            process = subprocess.Popen(
                [sys.executable, *torchrun, __file__, *options],
                env={"TORCHINDUCTOR_COMPILE_THREADS": "2", **os.environ, **variables},
                stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            signalled = send_sigterm(process, folder, args) if case == "sigterm" else None
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, began + args.run_seconds - time.monotonic()))
            left, until = processes(mark), time.monotonic() + 10  # compile workers may end after their parent
            while process.poll() is not None and left and time.monotonic() < until:
                time.sleep(0.2)
                left = processes(mark)
            seconds = (time.time() - signalled) if signalled else time.monotonic() - began
        finally:
            code = process.poll()
            kill(mark)
            process.wait()
        results = read(folder, "result")
        compiles = [sum(began > (signalled or 0) for began in rank) for rank in read(folder, "compiles")]
        printed_text = (folder / "printed").read_text()
    return {
        "case": case, "way": way, "seconds": seconds, "exit_code": code,
        "outcome": "killed after --run-seconds" if code is None else "ended" if code == 0 else "ended with an error",
        "losses": [rank["losses"] for rank in results], "fallbacks": [rank.get("fallbacks") for rank in results],
        "compiles": compiles, "compiles_after_signal": max(compiles, default=0) if signalled else None,
        "signalled": signalled is not None, "processes_left": len(left),
        "environment": results[0]["environment"] if results else None,
        "printed": printed_text[-1500:] if code else "",
    }  # fmt: skip


def send_sigterm(process: subprocess.Popen[bytes], folder: Path, args: argparse.Namespace) -> float | None:
    """Send SIGTERM to both ranks when both compile; returns the time, or ``None`` if they never did."""
    deadline = time.monotonic() + args.run_seconds / 2
    while len(list(folder.glob("compiles.*.json"))) < 2 or len(list(folder.glob("pid.*"))) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    time.sleep(0.5)
    for path in folder.glob("pid.*"):
        os.kill(int(path.read_text()), signal.SIGTERM)
    return time.time()


def compare(rows: list[Row], args: argparse.Namespace) -> None:
    """Compare losses with eager's, and the end of each run with what this script's text promises."""
    eager = next((row["losses"] for row in rows if row["way"] == EAGER), [])
    by_hand = {row["case"]: row for row in rows if row["way"] == BY_HAND}
    for row in rows:
        row["loss_difference"] = row["passed"] = None
        losses = row["losses"]
        if row["case"] != "sigterm" and len(losses) == len(eager) == 2:
            pairs = [
                pair for ours, theirs in zip(losses, eager, strict=True) for pair in zip(ours, theirs, strict=True)
            ]
            row["loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        equal = row["exit_code"] == 0 and (row["loss_difference"] or 0.0) < TOLERANCE and bool(losses)
        if row["case"] == "sigterm":
            quick = row["signalled"] and row["exit_code"] is not None and row["seconds"] < args.end_seconds
            row["passed"] = bool(quick) and row["processes_left"] == 0 and row["compiles_after_signal"] == 0
        elif row["case"] == "slow":
            other = by_hand.get("slow", row)
            row["passed"] = equal or (row["exit_code"] is not None and row["exit_code"] == other["exit_code"])
        elif row["case"] == "failure":
            row["passed"] = equal and row["fallbacks"][0] == 0 and row["fallbacks"][1] > 0
        else:
            row["passed"] = equal


def main() -> None:
    parser = parser_for(__doc__)
    add = parser.add_argument
    cases = list(dict.fromkeys(case for case, _ in RUNS))
    add("--cases", nargs="+", choices=cases, default=cases, help="none is the eager run that the others equal")
    add("--mode", default="default")
    add("--delay", type=float, default=60.0, help="seconds that the second rank compiles longer")
    add("--timeout", type=float, default=600.0, help="seconds after which collectives time out")
    add("--end-seconds", type=float, default=60.0, help="longest time from SIGTERM to the end")
    add("--run-seconds", type=float, default=240.0, help="kill a run after that time")
    add(
        "--jobs",
        type=int,
        default=max(1, min(len(RUNS), len(os.sched_getaffinity(0)) // 4)),
        help="runs at the same time",
    )
    add("--child", nargs=2, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    rows: list[Row] = []
    found = None
    with ThreadPoolExecutor(args.jobs) as pool:
        for run in as_completed([pool.submit(measure, case, way, args) for case, way in RUNS if case in args.cases]):
            row = run.result()
            found = row.pop("environment") or found
            rows = sorted([*rows, row], key=lambda row: RUNS.index((row["case"], row["way"])))
            compare(rows, args)
            say(str(row))
            save(args.json, f"Two ranks, faults; {args.delay:.0f} s longer, timeout {args.timeout:.0f} s", rows, found)
    print_columns(COLUMNS, rows)


if __name__ == "__main__":
    main()
