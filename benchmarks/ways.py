"""Runs one way of a workload in its own process: prepares, reports that it is ready, and runs blocks on request."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.config
from conduct import Variant, Workload
from models import make
from torch import Tensor
from trainer import Classifier, Ordinary, loader, make_trainer
from turn import Turn

from compile_callbacks import GraphPass, InductorBackend, InductorCompile
from compile_callbacks.report.file import environment

WARM_UP_STEPS = 3  # not timed, before each block: other processes have used the device since the last block
TIMED_CORES = 4  # for the steps, for backward passes, and two to spare
SETTLE_EVERY = 5
MOST_PREPARING_STEPS = 5000


class Done(Exception):  # noqa: N818
    """Stops a predict run, which Lightning cannot stop otherwise."""


class Pacer(pl.Callback):
    """Holds each step until it may run. As a callback it precedes `InductorCompile`, whose times exclude the waiting.

    The preparation takes at least ``steps`` steps, and lasts until ``settled``; then ``info`` is sent.
    """

    def __init__(
        self,
        connection: Connection,
        turn: Turn,
        steps: int,
        settled: Callable[[], bool] = lambda: True,
        info: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._connection, self._turn, self._steps = connection, turn, steps
        self._settled, self._info = settled, info
        self._script = self._pace()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before_step()

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.before_step()

    def before_step(self) -> None:
        """Return when the next step may run; raise `Done` after the last one."""
        try:
            next(self._script)
        except StopIteration:
            raise Done from None

    def _pace(self) -> Iterator[None]:
        turn, started, waited = self._turn, time.perf_counter(), self._turn.waited_seconds
        turn.take()
        yield
        turn.synchronize()
        first_step_seconds = time.perf_counter() - started - (turn.waited_seconds - waited)
        done = 1
        while done < self._steps or not self._settled():
            if done > MOST_PREPARING_STEPS:
                raise RuntimeError(f"nothing is chosen after {done} steps")
            for _ in range(SETTLE_EVERY):  # `settled` synchronizes the device
                turn.take()
                yield
                done += 1
        turn.give()
        seconds = time.perf_counter() - started - (turn.waited_seconds - waited)
        if torch.cuda.is_initialized():
            use_few_cores()
        info = {"first_step_seconds": first_step_seconds, "prepare_seconds": seconds, "prepare_steps": done}
        info |= {"compile_seconds": turn.compile_seconds, "environment": environment()}
        if torch.cuda.is_initialized():
            info["peak_memory_mib"] = torch.cuda.max_memory_allocated() / 2**20
            info["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
        self._connection.send(("ready", info | self._info()))
        while (steps := self._connection.recv()) is not None:
            for _ in range(WARM_UP_STEPS):
                yield
            turn.synchronize()
            compiles, begun = turn.compiles, time.perf_counter()
            for _ in range(steps):
                yield
            turn.synchronize()
            milliseconds = (time.perf_counter() - begun) / steps * 1000
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # leave room for the other processes
            self._connection.send(("block", None if turn.compiles > compiles else milliseconds))


def use_few_cores() -> None:
    """Run on the same few cores in all processes: other work may keep some cores of the machine busier than others."""
    cores = sorted(os.sched_getaffinity(0))[-TIMED_CORES:]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


def run(work: Workload, way: Variant, connection: Connection, lock: Path, steps: int, cache: str | None) -> None:
    """Prepare with at least ``steps`` steps, and run blocks until told to stop.

    ``lock`` is the file of the turns, and ``cache`` the folder for compiled code; ``None`` for torch's default.
    """
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = f"{cache}/inductor", f"{cache}/triton"
    os.dup2(2, 1)  # only tables go to stdout
    try:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_float32_matmul_precision("high")
        turn = Turn(lock, cuda=work.device == "cuda")
        turn.listen()
        with contextlib.suppress(Done):
            run_of(way)(work, way, connection, turn, steps)
    except BaseException:
        with contextlib.suppress(BrokenPipeError):
            connection.send(("failed", traceback.format_exc()))


def run_of(way: Variant) -> Callable[..., None]:
    return in_trainer if way.loop in ("fit", "predict") else in_bare_loop


def in_trainer(work: Workload, way: Variant, connection: Connection, turn: Turn, steps: int) -> None:
    turn.take()
    net, inputs, labels = make(work.model, work.batch_size, work.image_size, work.device)
    turn.give()
    module = (Ordinary if work.ordinary else Classifier)(net)
    if way.compiled == "child":
        module.net = compiled_by_hand(net, way)
    if way.compiled == "callback":
        phase = "train" if way.loop == "fit" else "infer"
        modes = {"train_mode": None, "infer_mode": None, f"{phase}_mode": way.mode}
        # "auto" rejects a candidate with other results; for the other ways, results are not the subject here.
        verify = "warn" if way.mode == "auto" else "off"
        passes = [max_pool_pass()] if way.max_pool_pass else []
        settings = {} if work.ordinary else {"baseline_steps": 0, "verify": verify}
        callback = InductorCompile(**modes, targets=way.targets, passes=passes, background=way.background, **settings)

        def settled() -> bool:
            report = getattr(callback.report, phase)
            if way.background:
                return bool(report.diagnostics.steps.get("compiled"))
            trials = report.diagnostics.trials if way.mode == "auto" else ({"verdict": "chosen"},)
            return any(trial["verdict"] == "chosen" for trial in trials)

        def info() -> dict[str, Any]:
            return {"report": getattr(callback.report, phase).to_dict()}

        callbacks = [Pacer(connection, turn, steps, settled, info), callback]
    else:
        callbacks = [Pacer(connection, turn, steps)]
    trainer = make_trainer(work.device, *callbacks)
    batches = loader([(inputs, labels)], work.run_steps)
    if way.loop == "fit":
        trainer.fit(torch.compile(module) if way.compiled == "module" else module, batches)
    else:
        trainer.predict(module, batches, return_predictions=False)


def max_pool_pass() -> GraphPass:
    """The graph pass of the example."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    from max_pool_backward import TritonMaxPoolBackward

    return TritonMaxPoolBackward()


def in_bare_loop(work: Workload, way: Variant, connection: Connection, turn: Turn, steps: int) -> None:
    turn.take()
    net, images, _ = make(work.model, work.batch_size, work.image_size, work.device)
    net.eval()
    info: dict[str, Any] = {}
    if way.loop == "backend":
        waited, started = turn.waited_seconds, time.perf_counter()
        with autocast(work):
            backend = InductorBackend(way.mode, on_error="raise").build(net, images, work.device)
        info["first_step_seconds"] = time.perf_counter() - started - (turn.waited_seconds - waited)
        call = backend.infer
    else:
        forward = net if way.compiled is None else compiled_by_hand(net, way)

        def call(images: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return forward(images)

    pacer = Pacer(connection, turn, steps, info=lambda: info)
    # One context around the loop: within a context, autocast keeps its casts of weights for the next call.
    with torch.no_grad(), autocast(work):
        while True:
            pacer.before_step()
            call(images)


def compiled_by_hand(net: torch.nn.Module, way: Variant) -> Any:
    """Compile as a user does. This changes global settings of torch."""
    if not isinstance(way.mode, dict):
        return torch.compile(net, mode=way.mode)
    # torch freezes if this global is set during tracing; the option alone has no effect.
    torch._inductor.config.freezing = bool(way.mode.get("freezing"))
    return torch.compile(net, options=way.mode)


def autocast(work: Workload) -> torch.autocast:
    return torch.autocast(work.device, torch.bfloat16, enabled=work.device == "cuda")
