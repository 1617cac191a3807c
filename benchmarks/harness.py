"""Runs several ways of one workload as processes, and times them in alternating blocks with nothing else running.

The processes prepare one after another: each compiles and warms up while the others wait. When all of them are ready,
each in turn runs a block of steps.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch._inductor.config
from models import make
from tables import Row, alternate, compare_blocks, ms, save, say, summarize
from torch import Tensor
from torch._dynamo.callback import callback_handler
from trainer import Classifier, loader, make_trainer, synchronize

from compile_callbacks import InductorBackend, InductorCompile
from compile_callbacks.report.file import environment

WARM_UP_STEPS = 3  # not timed, before each block: other processes have used the device since the last block
TIMED_CORES = 4  # for the steps, for backward passes, and two to spare
SETTLE_EVERY = 5
MOST_PREPARING_STEPS = 5000


@dataclass(frozen=True)
class Workload:
    """A workload. ``run_steps`` is the length that the Trainer announces, with which "auto" weighs its trials."""

    model: str  # a name that `models.make` takes
    batch_size: int
    image_size: int
    device: str
    run_steps: int


@dataclass(frozen=True)
class Variant:
    """A way to run a workload: in a Trainer, in a loop without one, or of `InductorBackend.infer`."""

    name: str
    loop: Literal["predict", "bare", "backend"]
    compiled: Literal["hand", "callback"] | None = None  # by hand, or by this library
    mode: Any = None


Group = tuple[Workload, Sequence[Variant]]


def add_pacing(parser: ArgumentParser) -> None:
    """Add the options of the benchmarks that run each way in its own process."""
    add = parser.add_argument
    add("--steps", type=int, default=60, help="timed steps of each way, at least")
    add("--blocks", type=int, default=10, help="number of blocks that these steps are divided into")
    add("--block-seconds", type=float, default=0.1, help="shortest duration of a block")
    add("--prepare-steps", type=int, default=10, help="steps of each way before the timed ones")
    help_text = "time that each way runs before its first block; the callback times half of its first 600 steps itself"
    add("--warm-up-seconds", type=float, default=0.0, help=help_text)
    add("--patience", type=float, default=300.0, metavar="SECONDS", help="a way that takes longer to prepare fails")


def rows_of(args: Namespace, title: str, groups: Iterable[Group]) -> list[Row]:
    """Measure each group, and write the rows to ``args.json``.

    Args:
        args: The options of `parser_for` and `add_pacing`.
        title: The title of the file.
        groups: Workloads, and the ways to run each.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the processes too
    rows: list[Row] = []
    found = None
    for work, ways in groups:
        measured = measure(work, ways, args)
        eager_ms = next((row["block_ms"] for row in measured if row["way"] == "eager"), ())
        for row in measured:
            found = row.pop("environment", None) or found
            row |= compare_blocks(() if row["way"] == "eager" else eager_ms, row["block_ms"])
            say(f"{row['model']}, batch {row['batch_size']}, {row['way']}: step ms {ms(row['step_ms'])}")
        rows += measured
        save(args.json, title, rows, found)
    return rows


def measure(work: Workload, ways: Sequence[Variant], args: Namespace) -> list[Row]:
    """Prepare all ways, and time them in alternating blocks."""
    processes: list[Process] = []
    try:
        for way in ways:
            processes.append(Process(work, way, args))
            processes[-1].prepare()
        for process in processes:
            process.choose_steps()
        samples = alternate({process.way.name: process.block for process in processes}, args.blocks)
        return [process.row(samples[process.way.name]) for process in processes]
    finally:
        for process in processes:
            process.end()


class Process:
    """The process of one way, seen from outside."""

    def __init__(self, work: Workload, way: Variant, args: Namespace) -> None:
        self.work, self.way, self._args = work, way, args
        self.label = f"{work.model}, batch {work.batch_size}: {way.name}"
        self.info: dict[str, Any] = {}
        self.failure: str | None = None
        self.steps = 0
        context = multiprocessing.get_context("spawn")
        self.connection, its_connection = context.Pipe()
        arguments = work, way, its_connection, args.prepare_steps
        self._process = context.Process(target=run, args=arguments, daemon=True)
        self._process.start()
        its_connection.close()  # so that its end is noticed

    def prepare(self) -> None:
        """Wait until the process has compiled and run its first steps."""
        started = time.perf_counter()
        if self.connection.poll(self._args.patience):
            self.info = self.receive() or {}
            say(f"{self.label} is ready after {time.perf_counter() - started:.0f} s")
        else:
            self.fail(f"was not ready after {self._args.patience:.0f} s")
            self.end()

    def fail(self, reason: str) -> None:
        self.failure = reason
        say(f"{self.label} failed: {reason}")

    def receive(self) -> Any:
        """The next message; ``None`` if the process failed."""
        try:
            kind, content = self.connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            kind, content = "failed", f"the process ended with exit code {self._process.exitcode}"
        if kind == "failed":
            self.fail(content)
            return None
        return content

    def block(self, steps: int | None = None) -> float | None:
        """Run a block; returns the milliseconds of a step, or ``None`` if something compiled or failed."""
        if self.failure is not None:
            return None
        with contextlib.suppress(ConnectionError):  # `receive` reports it
            self.connection.send(steps or self.steps)
        return self.receive()

    def choose_steps(self) -> None:
        """Set the number of steps of a block."""
        args = self._args
        milliseconds = self.block(3) or math.inf
        self.steps = max(math.ceil(args.steps / args.blocks), round(args.block_seconds * 1000 / milliseconds))
        if args.warm_up_seconds:
            self.block(max(1, round(args.warm_up_seconds * 1000 / milliseconds)))

    def end(self) -> None:
        if self._process.is_alive() and self.failure is None:
            with contextlib.suppress(ConnectionError):
                self.connection.send(None)
            self._process.join(0.5)
        self._process.kill()
        self._process.join()

    def row(self, block_ms: Sequence[float]) -> Row:
        report = self.info.pop("report", None) or {}
        trials = list(report.get("diagnostics", {}).get("trials", ())) if self.way.mode == "auto" else []
        return {
            **vars(self.work), "way": self.way.name, **summarize(block_ms), "steps_per_block": self.steps,
            "block_ms": list(block_ms), "trials": trials, "graphs": report.get("graphs"), "failure": self.failure,
            "chosen": next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None), **self.info,
        }  # fmt: skip


# ------------------------------------------------------------------------------------------ in the process of a way


class Done(Exception):  # noqa: N818
    """Stops a predict run, which Lightning cannot stop otherwise."""


class Compiles:
    """The number of compiles and recordings of CUDA graphs in this process."""

    def __init__(self) -> None:
        self.count = 0
        callback_handler.register_start_callback(self._starts)

    def _starts(self, args: Any) -> None:
        self.count += 1


class Pacer(pl.Callback):
    """Holds each step until it may run. As a callback it precedes `InductorCompile`, whose times exclude the waiting.

    The preparation takes at least ``steps`` steps, and lasts until ``settled``; then ``info`` is sent.
    """

    def __init__(
        self,
        connection: Connection,
        steps: int,
        settled: Callable[[], bool] = lambda: True,
        info: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._connection, self._steps, self._settled, self._info = connection, steps, settled, info
        self._compiles, self._script = Compiles(), self._pace()

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.before_step()

    def before_step(self) -> None:
        """Return when the next step may run; raise `Done` after the last one."""
        try:
            next(self._script)
        except StopIteration:
            raise Done from None

    def _pace(self) -> Iterator[None]:
        compiles, started = self._compiles, time.perf_counter()
        yield
        done = 1
        while done < self._steps or not self._settled():
            if done > MOST_PREPARING_STEPS:
                raise RuntimeError(f"nothing is chosen after {done} steps")
            for _ in range(SETTLE_EVERY):  # `settled` synchronizes the device
                yield
                done += 1
        synchronize()
        info = {"prepare_seconds": time.perf_counter() - started, "prepare_steps": done, "environment": environment()}
        if torch.cuda.is_initialized():
            use_few_cores()
            torch.cuda.empty_cache()  # leave room for the other processes
        self._connection.send(("ready", info | self._info()))
        while (steps := self._connection.recv()) is not None:
            for _ in range(WARM_UP_STEPS):
                yield
            synchronize()
            count, begun = compiles.count, time.perf_counter()
            for _ in range(steps):
                yield
            synchronize()
            milliseconds = (time.perf_counter() - begun) / steps * 1000
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            self._connection.send(("block", None if compiles.count > count else milliseconds))


def use_few_cores() -> None:
    """Run on the same few cores in all processes: other work may keep some cores of the machine busier than others."""
    cores = sorted(os.sched_getaffinity(0))[-TIMED_CORES:]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


def run(work: Workload, way: Variant, connection: Connection, steps: int) -> None:
    """Prepare with at least ``steps`` steps, and run blocks until told to stop."""
    os.dup2(2, 1)  # only tables go to stdout
    try:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_float32_matmul_precision("high")
        with contextlib.suppress(Done):
            loop = in_trainer if way.loop == "predict" else in_bare_loop
            loop(work, way, connection, steps)
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            connection.send(("failed", traceback.format_exc()))


def in_trainer(work: Workload, way: Variant, connection: Connection, steps: int) -> None:
    net, inputs, labels = make(work.model, work.batch_size, work.image_size, work.device)
    module = Classifier(compiled_by_hand(net, way) if way.compiled == "hand" else net)
    if way.compiled == "callback":
        # "auto" rejects a candidate with other results; for the other ways, results are not the subject here.
        verify = "warn" if way.mode == "auto" else "off"
        callback = InductorCompile(train_mode=None, infer_mode=way.mode, baseline_steps=0, verify=verify)

        def settled() -> bool:
            trials = callback.report.infer.diagnostics.trials if way.mode == "auto" else ({"verdict": "chosen"},)
            return any(trial["verdict"] == "chosen" for trial in trials)

        pacer = Pacer(connection, steps, settled, lambda: {"report": callback.report.infer.to_dict()})
        callbacks = [pacer, callback]
    else:
        callbacks = [Pacer(connection, steps)]
    batches = loader([(inputs, labels)], work.run_steps)
    make_trainer(work.device, *callbacks).predict(module, batches, return_predictions=False)


def in_bare_loop(work: Workload, way: Variant, connection: Connection, steps: int) -> None:
    net, images, _ = make(work.model, work.batch_size, work.image_size, work.device)
    net.eval()
    pacer = Pacer(connection, steps)
    if way.loop == "backend":
        with autocast(work):
            call = InductorBackend(way.mode, on_error="raise").build(net, images, work.device).infer
    else:
        forward = net if way.compiled is None else compiled_by_hand(net, way)

        def call(images: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return forward(images)

    # One context around the loop: within a context, autocast keeps its casts of weights for the next call.
    with torch.no_grad(), autocast(work):
        while True:
            pacer.before_step()
            call(images)


def compiled_by_hand(net: torch.nn.Module, way: Variant) -> Any:
    """Compile as a user does. This changes a global setting of torch."""
    # torch freezes if this global is set during tracing; the option alone has no effect.
    torch._inductor.config.freezing = bool(way.mode.get("freezing"))
    return torch.compile(net, options=way.mode)


def autocast(work: Workload) -> torch.autocast:
    return torch.autocast(work.device, torch.bfloat16, enabled=work.device == "cuda")
