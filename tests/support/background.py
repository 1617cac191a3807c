"""Runs with ``background=True`` that end when a condition is true."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback

from compile_callbacks import InductorCompile
from tests.support.models import Classifier, loader, seeded, trainer

SECONDS = 250


def compiled_steps(count: int) -> Callable[[Any], bool]:
    return lambda report: report.train.diagnostics.steps.get("compiled", 0) >= count


def pids(callback: InductorCompile) -> set[int]:
    """The helper process of a callback."""
    process = callback.session._helper._process
    return set() if process is None else {process.pid}


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def run(
    callback: InductorCompile,
    is_over: Callable[[Any], Any],
    module: Any = None,
    *,
    when_waiting: Callable[[pl.Trainer], Any] | None = None,
    data: Any = None,
    ckpt_path: Any = None,
    starts_process: bool = True,
    **settings: Any,
) -> Classifier:
    """Train until a condition of the report is true, and return the module. Afterwards, no helper process runs.

    Sleeps in steps, so that the helper process can run. Calls a function in the first step that waits for its code.
    """
    started, waiting, ends = set(), [when_waiting] if when_waiting else [], time.monotonic() + SECONDS

    def on_train_batch_end(trainer: pl.Trainer, *args: object) -> None:
        started.update(pids(callback))
        train = callback.report.train.diagnostics
        if not train.steps.get("compiled"):
            time.sleep(0.02)
        if train.waiting_steps and waiting:
            waiting.pop()(trainer)
        assert time.monotonic() < ends
        trainer.should_stop |= bool(is_over(callback.report))

    module, hook = module or seeded(), LambdaCallback(on_train_batch_end=on_train_batch_end)
    try:
        fitting = trainer(callback, hook, **{"max_epochs": -1, **settings})
        fitting.fit(module, data or loader(), loader(2), ckpt_path=ckpt_path)
    finally:
        assert bool(started) == starts_process
        assert not any(is_running(pid) for pid in started)
    return module


def assert_trained_as_eager(module: Any, make: Any = seeded, data: Any = None, accumulated: int = 1) -> None:
    """Assert that the losses of a run, and its weights if they do not depend on its end, equal eager's."""
    eager, count = make(), len(module.losses)
    runner = trainer(max_steps=-(-count // accumulated), max_epochs=-1, accumulate_grad_batches=accumulated)
    runner.fit(eager, data or loader())
    torch.testing.assert_close(torch.tensor(module.losses), torch.tensor(eager.losses[:count]), rtol=1e-3, atol=1e-3)
    if count % accumulated == 0:
        torch.testing.assert_close(module.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-3)
