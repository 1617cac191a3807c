"""The truth of the numbers: a stopwatch from outside, over real runs."""

from __future__ import annotations

import statistics
import time

import lightning.pytorch as pl
import pytest
import torch
from models import Classifier, loader, trainer
from torch import nn
from uncached import Uncached

from compile_callbacks import InductorCompile

FEATURES, STEPS = 8, 200


class Stopwatch(pl.Callback):
    """Times each training step by itself, synchronised where there is a GPU."""

    def __init__(self):
        self.milliseconds: list[float] = []

    def now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *args):
        self.started = self.now()

    def on_train_batch_end(self, *args):
        self.milliseconds.append((self.now() - self.started) * 1000)


def net(width=512):
    """Steps of more than a millisecond, so that a few microseconds here or there say nothing."""
    layers = [nn.Linear(FEATURES, width), nn.ReLU(), *(nn.Linear(width, width) for _ in range(4))]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def run(accelerator):
    watch = Stopwatch()
    callback = InductorCompile("default", None, passes=[Uncached()], verify="off", baseline_steps=50)
    module = Classifier(net())
    trainer(callback, watch, accelerator=accelerator).fit(module, loader(STEPS, batch_size=64))
    return callback.report.train, watch.milliseconds


@pytest.mark.parametrize(
    ("accelerator", "tolerance"), [("cpu", 0.03), pytest.param("cuda", 0.02, marks=pytest.mark.gpu)]
)
def test_a_stopwatch_from_outside_agrees(accelerator, tolerance):
    torch.compile(lambda x: x + 1)(torch.ones(1))  # the process's first compile imports Inductor before it is announced
    for _ in range(3):  # other work on the machine comes between one clock and the other
        report, milliseconds = run(accelerator)
        eager, compiled = milliseconds[2:52], milliseconds[55:]
        assert report.samples == len(eager) == 50
        beyond_the_median = (milliseconds[52] - statistics.median(compiled)) / 1000
        expected = [statistics.median(eager), statistics.median(compiled), beyond_the_median]
        measured = [report.eager_step_ms, report.compiled_step_ms, report.compile_seconds]
        allowed = [tolerance, tolerance, 0.05]
        off = [abs(m / e - 1) / a for m, e, a in zip(measured, expected, allowed, strict=True)]
        if max(off) <= 1:
            return
    pytest.fail(f"measured {measured}, a stopwatch {expected}")
