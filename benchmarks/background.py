"""`background=True` against compiling by hand and eager: one model in a Trainer, each way alone.

python benchmarks/background.py [--model resnet18] [--batch-size 16] [--image-size 32] [--mode default] [--json FILE]

Each way is a new process with an empty cache, and runs ``--steady-steps`` steps after its last compile. The columns:

- longest_s: the longest step, in which training waits;
- meanwhile, meanwhile_ms: the steps while the helper process compiles, and their median;
- load_s: the load of the compiled code, a part of a step;
- steady_ms: the median of the last steps;
- first_100_s: the seconds of the first 100 steps;
- behind_s: the most seconds by which the end of a step lies behind that of the eager run;
- seconds: the duration of all steps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
import warnings

import lightning.pytorch as pl
import torch
from models import make
from tables import Row, in_own_process, parser_for, print_columns, save, say, write_row
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorCompile
from compile_callbacks.report.file import environment

EAGER, BY_HAND, BACKGROUND = "eager", "by hand", "background"
MAX_SECONDS = 500
COLUMNS = {
    "way": "{}", "longest_s": "{:.2f}", "meanwhile": "{}", "meanwhile_ms": "{:.2f}", "load_s": "{:.2f}",
    "steady_ms": "{:.2f}", "first_100_s": "{:.2f}", "behind_s": "{:.1f}", "steps": "{}", "seconds": "{:.1f}",
}  # fmt: skip
COMPARED = {
    "workload": "{}", "longest_s,_by_hand": "{:.1f}", "in_the_background": "{:.1f}",
    "seconds_of_100_steps,_eager": "{:.2f}", "seconds_of_100_steps,_by_hand": "{:.2f}",
    "seconds_of_100_steps,_in_the_background": "{:.2f}", "lost_seconds": "{:.2f}", "step_ms,_eager": "{:.1f}",
    "step_ms,_meanwhile": "{:.1f}", "step_ms,_by_hand": "{:.1f}", "step_ms,_in_the_background": "{:.1f}",
}  # fmt: skip


class Clock(pl.Callback):
    """Times each step, and ends the run after the steady steps."""

    def __init__(self, callback: InductorCompile | None, steady_steps: int) -> None:
        self.callback, self.steady_steps = callback, steady_steps
        self.seconds: list[float] = []
        self.compiled_since: int | None = None

    def on_train_start(self, trainer, pl_module):
        self.began = time.perf_counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step_began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        synchronize()
        now = time.perf_counter()
        self.seconds.append(now - self.step_began)
        if self.compiled_since is None and self.is_compiled():
            self.compiled_since = len(self.seconds)
        steady = self.compiled_since is not None and len(self.seconds) - self.compiled_since >= self.steady_steps
        if steady or now - self.began > MAX_SECONDS:
            trainer.should_stop = True

    def is_compiled(self) -> bool:
        if self.callback is None:
            return True
        return any(event.graphs for event in self.callback.session._recorder.events)


def run(args: argparse.Namespace, way: str) -> Row:
    """One way, in this process."""
    warnings.simplefilter("ignore")
    torch.set_float32_matmul_precision("high")
    if args.threads:
        torch.set_num_threads(args.threads)
    net, images, labels = make(args.model, args.batch_size, args.image_size, args.device)
    module = Classifier(net)
    callback = None
    if way == BY_HAND:
        module.net.compile(mode=args.mode)
    elif way == BACKGROUND:
        callback = InductorCompile(train_mode=args.mode, background=True)
    clock = Clock(callback, args.steady_steps)
    trainer = make_trainer(args.device, clock, *([callback] if callback else []))
    trainer.fit(module, loader([(images, labels)], 10**9))
    row: Row = {"way": way, "steps": len(clock.seconds), "seconds": sum(clock.seconds), "environment": environment()}
    row["steady_ms"] = statistics.median(clock.seconds[-args.steady_steps :]) * 1000
    row |= {"first_100_s": sum(clock.seconds[:100]), "step_s": clock.seconds}
    slowest = sorted(range(len(clock.seconds)), key=lambda i: -clock.seconds[i])[:3]
    row |= {"longest_s": max(clock.seconds), "longest_steps": [(i + 1, round(clock.seconds[i], 3)) for i in slowest]}
    if way == BACKGROUND:
        report = callback.report.train
        details = report.diagnostics
        row |= {
            "meanwhile": details.waiting_steps,
            "meanwhile_ms": details.waiting_step_ms,
            "load_s": details.load_seconds,
        }
        row |= {"waited_s": report.compile_seconds, "helper_s": report.background_seconds, "verdict": report.verdict}
    return row


def most_behind(step_s: list[float], eager_s: list[float]) -> float:
    """The most seconds by which steps end later than those of an eager run, which continues with its median."""
    eager = itertools.chain(eager_s, itertools.repeat(statistics.median(eager_s)))
    return max(ours - theirs for ours, theirs in zip(itertools.accumulate(step_s), itertools.accumulate(eager)))  # noqa: B905


def compared(workload: str, rows: dict[str, Row]) -> Row:
    """The three ways of a workload in one row."""
    eager, hand, ours = (rows.get(way, {}) for way in (EAGER, BY_HAND, BACKGROUND))
    first_100 = [row.get("first_100_s") if row.get("steps", 0) >= 100 else None for row in (eager, hand, ours)]
    lost = None if None in first_100 else first_100[2] - min(first_100[:2])  # type: ignore[operator, type-var]
    times = [eager.get("steady_ms"), ours.get("meanwhile_ms"), hand.get("steady_ms"), ours.get("steady_ms")]
    values = [workload, hand.get("longest_s"), ours.get("longest_s"), *first_100, lost, *times]
    return dict(zip(COMPARED, values, strict=True))


def main() -> None:
    """Run each way in a new process, and print the tables."""
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--mode", default="default")
    parser.add_argument("--steady-steps", type=int, default=60)
    parser.add_argument("--threads", type=int, help="of the process that trains on a CPU")
    ways = [EAGER, BY_HAND, BACKGROUND]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--run-way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_way:
        os.dup2(2, 1)
        write_row(run(args, args.run_way))
        return
    title = f"{args.model}, batch {args.batch_size}, {args.mode}"
    title += f", {args.threads} thread{'s' * (args.threads > 1)}" if args.threads else ""
    rows: dict[str, Row] = {}
    step_s: dict[str, list[float]] = {}
    for way in args.ways:
        rows[way] = in_own_process(way)
        step_s[way] = rows[way].pop("step_s")
        if EAGER in step_s:
            rows[way]["behind_s"] = most_behind(step_s[way], step_s[EAGER])
        say(f"{way}: longest {rows[way]['longest_steps']}, steady {rows[way]['steady_ms']:.2f} ms")
        found = rows[way].pop("environment")
        known = [{**dict.fromkeys(COLUMNS), **row} for row in rows.values()]
        save(args.json, title, known, found)
    print_columns(COLUMNS, known)


if __name__ == "__main__":
    main()
