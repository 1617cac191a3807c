"""Runs several ways of one workload as processes, and times them in alternating blocks with nothing else running.

The processes prepare together and take turns on the device (`turn`). When all of them are ready, the processes of one
workload run a block of steps each, and wait while the others run theirs.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from bench_measure import alternate, summarize


@dataclass(frozen=True)
class Workload:
    """A workload.

    ``run_steps`` is the length of the run that the Trainer announces, for "auto" to weigh its trials. An ``ordinary``
    workload trains with AdamW and logs the loss, and the callback has its default settings.
    """

    model: str  # a name that `models.make` takes
    phase: Literal["train", "infer"]
    batch_size: int
    image_size: int
    device: str
    run_steps: int
    ordinary: bool = False


@dataclass(frozen=True)
class Variant:
    """A way to run a workload: in a Trainer, in a loop without one, or of `InductorBackend.infer`."""

    name: str
    loop: Literal["fit", "predict", "bare", "backend"]
    compiled: Literal["child", "module", "callback"] | None = None  # by hand, Lightning's own, or by this library
    mode: Any = None
    targets: Any = None  # of the callback
    background: bool = False  # of the callback
    max_pool_pass: bool = False  # the graph pass of examples/max_pool_backward.py for the callback


Group = tuple[Workload, Sequence[Variant]]


class Process:
    """The process of one way, seen from outside."""

    def __init__(self, work: Workload, way: Variant, lock: Path, prepare_steps: int, cache: str | None) -> None:
        self.work, self.way = work, way
        self.label = f"{work.model}, {work.phase}, batch {work.batch_size}: {way.name}"
        self.info: dict[str, Any] | None = None
        self.failure: str | None = None
        self.steps = 0
        context = multiprocessing.get_context("spawn")
        self.connection, self._its_connection = context.Pipe()
        arguments = work, way, self._its_connection, lock, prepare_steps, cache
        self._process = context.Process(target=_run, args=arguments, daemon=True)

    def start(self) -> None:
        self._process.start()
        self._its_connection.close()  # so that its end is noticed

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

    def choose_steps(self, options: Namespace) -> None:
        """Set the number of steps of a block."""
        milliseconds = self.block(3) or math.inf
        least = math.ceil(options.steps / options.blocks)
        self.steps = max(1, least, round(options.block_seconds * 1000 / milliseconds))
        if options.warm_up_seconds:
            self.block(max(1, round(options.warm_up_seconds * 1000 / milliseconds)))

    def end(self) -> None:
        if not self._process.is_alive():
            return
        if self.info is not None and self.failure is None:
            with contextlib.suppress(ConnectionError):
                self.connection.send(None)
            self._process.join(0.5)
        self._process.kill()
        self._process.join()

    def row(self, block_ms: Sequence[float]) -> dict[str, Any]:
        info = self.info or {}
        report = info.pop("report", None) or {}
        trials = list(report.get("diagnostics", {}).get("trials", ())) if self.way.mode == "auto" else []
        return {
            **vars(self.work), "way": self.way.name, **summarize(block_ms), "steps_per_block": self.steps,
            "block_ms": list(block_ms), "trials": trials, "graphs": report.get("graphs"), "failure": self.failure,
            "verdict": report.get("verdict"), "reported_speedup": report.get("speedup"),
            "break_even_steps": report.get("break_even_steps"),
            "chosen": next((trial["candidate"] for trial in trials if trial["verdict"] == "chosen"), None), **info,
        }  # fmt: skip


def conduct(groups: Sequence[Group], options: Namespace, *, own_caches: bool = False) -> Iterator[list[dict[str, Any]]]:
    """Prepare all ways of all groups together, then yield the rows of one group after the other.

    Args:
        groups: Workloads, and the ways to run each.
        options: The options of `tables.add_pacing`.
        own_caches: Whether each process compiles with an empty cache.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which ends the processes too
    # All processes together have as many compile workers as there are cores.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, len(os.sched_getaffinity(0)) // options.jobs)))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        processes: list[Process] = []
        for work, way in [(work, way) for work, ways in groups for way in ways]:
            cache = f"{folder}/{len(processes)}" if own_caches else None
            processes.append(Process(work, way, Path(folder, "turn"), options.prepare_steps, cache))
        try:
            _prepare(processes, options)
            for work, _ in groups:
                of_group = [process for process in processes if process.work is work]
                for process in of_group:
                    process.choose_steps(options)
                samples = alternate({process.way.name: process.block for process in of_group}, options.blocks)
                yield [process.row(samples[process.way.name]) for process in of_group]
                for process in of_group:
                    process.end()
        finally:
            for process in processes:
                process.end()


def _run(*arguments: Any) -> None:
    from ways import run  # Lightning is imported in the process itself

    run(*arguments)


def _prepare(processes: Sequence[Process], options: Namespace) -> None:
    started = time.perf_counter()
    to_start, waiting = list(processes), []
    while to_start or waiting:
        while to_start and len(waiting) < options.jobs:
            waiting.append(to_start.pop(0))
            waiting[-1].start()
        left = options.patience - (time.perf_counter() - started)
        heard = wait([process.connection for process in waiting], timeout=max(0.0, left))
        for process in waiting:
            if process.connection in heard:
                process.info = process.receive()
                if process.info is not None:
                    say(f"{time.perf_counter() - started:4.0f} s  {process.label} is ready")
            elif left <= 0:
                process.fail(f"was not ready after {options.patience:.0f} s")
                process.end()
        waiting = [process for process in waiting if process.info is None and process.failure is None]


def say(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)
