"""Ways to do the same work, each in a process of its own that prepares, and then runs blocks of steps when told to."""

from __future__ import annotations

import contextlib
import logging
import os
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
from models import make
from torch import Tensor, nn
from turn import Turn
from work import Way, Work

import compile_callbacks
from compile_callbacks import InductorBackend, InductorCompile
from compile_callbacks.reporting.environment import environment

WARM_UP_STEPS = 3
"""Steps before each block that are not timed: other processes have used the device since the last one."""

TIMED_CORES = 4
"""Cores that a process has while it is timed on a GPU: one for the steps, one for backward passes, two to spare."""

_SETTLE_EVERY = 5
_MOST_PREPARING_STEPS = 5000


class Done(Exception):  # noqa: N818
    """No more steps are wanted: a predict run knows no other way to be stopped."""


class Player:
    """Paces the steps of one process.

    Args:
        connection: To whoever conducts.
        turn: On the device.
        steps: Steps to prepare with, at least.
        settled: Whether preparing is over after these.
        tell: What there is to tell then.
    """

    def __init__(
        self,
        connection: Connection,
        turn: Turn,
        steps: int,
        settled: Callable[[], bool] = lambda: True,
        tell: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._connection, self._turn, self._steps = connection, turn, steps
        self._settled, self._tell = settled, tell
        self._script = self._play()

    def before_step(self) -> None:
        """To be called before each step; returns when it is to run, and raises `Done` after the last."""
        try:
            next(self._script)
        except StopIteration:
            raise Done from None

    def _play(self) -> Iterator[None]:
        turn, started, waited = self._turn, time.perf_counter(), self._turn.waited_seconds
        turn.take()
        yield
        turn.synchronize()
        first_step_seconds = time.perf_counter() - started - (turn.waited_seconds - waited)
        done = 1
        while done < self._steps or not self._settled():
            if done > _MOST_PREPARING_STEPS:
                raise RuntimeError(f"nothing is settled after {done} steps")
            for _ in range(_SETTLE_EVERY):  # asking waits for the device
                turn.take()
                yield
                done += 1
        turn.give()
        seconds = time.perf_counter() - started - (turn.waited_seconds - waited)
        if torch.cuda.is_initialized():
            share_cores()
        told = {"first_step_seconds": first_step_seconds, "prepare_seconds": seconds, "prepare_steps": done}
        self._connection.send(("ready", told | {"compile_seconds": turn.compile_seconds} | self._tell()))
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
                torch.cuda.empty_cache()  # others are to have room for theirs
            self._connection.send(("block", None if turn.compiles > compiles else milliseconds))


def share_cores() -> None:
    """Run on a few cores from here on, the same in all processes.

    Others may keep some cores of a machine busier than others, and small steps wait for the host: a process that
    stays where it was started would be compared by where that is.
    """
    cores = sorted(os.sched_getaffinity(0))[-TIMED_CORES:]
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), cores)


class Pace(pl.Callback):
    """Paces a trainer's steps. It stands before `InductorCompile`, whose times then have no waiting in them."""

    def __init__(self, player: Player) -> None:
        self.player = player

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.player.before_step()

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.player.before_step()


class Classifier(pl.LightningModule):
    """A net that a Trainer trains, or predicts with."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3, momentum=0.9, fused=True)


class Fixed(torch.utils.data.Dataset):
    """The same batch on the device each time: data loading is not what is measured."""

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch


def play(work: Work, way: Way, connection: Connection, lock: Path, steps: int, cache: str | None) -> None:
    """The whole of one process: prepare, say so, and run blocks until told to stop.

    Args:
        work: What is done.
        way: How.
        connection: To whoever conducts.
        lock: The file of the turns.
        steps: Steps to prepare with.
        cache: A folder of its own for what is compiled; ``None``: torch's.
    """
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"] = f"{cache}/inductor", f"{cache}/triton"
    os.dup2(2, 1)  # tables alone are for stdout
    try:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)
        turn = Turn(lock, cuda=work.device == "cuda")
        turn.listen()
        with contextlib.suppress(Done):
            (_in_trainer if way.loop in ("fit", "predict") else _bare)(work, way, connection, turn, steps)
    except BaseException:
        with contextlib.suppress(BrokenPipeError):  # whoever conducts has gone
            connection.send(("failed", traceback.format_exc()))


def _in_trainer(work: Work, way: Way, connection: Connection, turn: Turn, steps: int) -> None:
    turn.take()
    net, inputs, labels = make(work.model, work.batch_size, work.image_size, work.device)
    turn.give()
    module = Classifier(net)
    callbacks: list[pl.Callback] = []
    settled, tell = (lambda: True), (lambda: {"environment": environment()})
    if way.compiled == "child":
        module.net = torch.compile(net, mode=way.mode)
    elif way.compiled == "callback":
        phase = "train" if way.loop == "fit" else "infer"
        modes = {"train_mode": None, "infer_mode": None, f"{phase}_mode": way.mode}
        # "auto" takes a candidate that computes something else for no candidate; others are not what is checked here.
        verify = "warn" if way.tuned else "off"
        passes = [getattr(compile_callbacks, name)() for name in way.passes]
        callback = InductorCompile(**modes, targets=way.targets, passes=passes, baseline_steps=0, verify=verify)
        callbacks.append(callback)

        def settled() -> bool:
            return not way.tuned or any(t["verdict"] == "chosen" for t in getattr(callback.report, phase).trials)

        def tell() -> dict[str, Any]:
            return {"environment": environment(), "report": getattr(callback.report, phase).to_dict()}

    player = Player(connection, turn, steps, settled, tell)
    trainer = pl.Trainer(
        accelerator=work.device, devices=1, precision="bf16-mixed" if work.device == "cuda" else "32-true",
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Pace(player), *callbacks],
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(Fixed((inputs, labels), work.run_steps), batch_size=None)
    if way.loop == "fit":
        trainer.fit(torch.compile(module) if way.compiled == "module" else module, batches)
    else:
        trainer.predict(module, batches, return_predictions=False)


def _bare(work: Work, way: Way, connection: Connection, turn: Turn, steps: int) -> None:
    started = time.perf_counter()
    turn.take()
    net, images, _ = make(work.model, work.batch_size, work.image_size, work.device)
    net.eval()
    tell: dict[str, Any] = {}
    if way.loop == "backend":
        waited, started = turn.waited_seconds, time.perf_counter()
        backend = InductorBackend(way.mode, on_error="raise").build(net, [((images,), {})], work.device)
        built_seconds = time.perf_counter() - started - (turn.waited_seconds - waited)
        tell = {"first_step_seconds": built_seconds}
        call = backend.infer
    else:
        forward = net if way.compiled is None else torch.compile(net, **_compile_arguments(way.mode))

        def call(images: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            # A context for each call, as in a Trainer's steps: within one, autocast remembers its casts of weights.
            with torch.no_grad(), torch.autocast(work.device, torch.bfloat16, enabled=work.device == "cuda"):
                return forward(images)

    player = Player(connection, turn, steps, tell=lambda: {"environment": environment(), **tell})
    while True:
        player.before_step()
        call(images)


def _compile_arguments(mode: Any) -> dict[str, Any]:
    if not isinstance(mode, dict):
        return {"mode": mode}
    # Torch freezes where the global is set while it traces: an option does not reach that.
    torch._inductor.config.freezing = bool(mode.get("freezing"))
    return {"options": mode}
