"""Compiles are known by target and phase, from any thread and after `torch.compiler.reset()`."""

from __future__ import annotations

import threading

import pytest
import torch
import torch._dynamo

from compile_callbacks import InductorCompile, compile_phases, report_of, restore
from tests.support.models import FEATURES, Classifier, Wrapper, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


class Waits(Wrapper):
    """Calls a function in the middle of its forward, with a graph break around it."""

    waiting = staticmethod(lambda: None)

    def forward(self, x):
        x = self.net(x)
        self.wait()
        return x * 2

    @torch._dynamo.disable
    def wait(self):
        self.waiting()


def test_overlapping_calls_of_two_threads_leave_the_users_own_compiles_uncounted():
    module = compile_phases(Waits(), train_mode=None, verify="off")
    first_in, second_in, first_out = (threading.Event() for _ in range(3))

    def waiting():
        if threading.current_thread().name == "first":
            first_in.set()
            assert second_in.wait(60)
        elif threading.current_thread().name == "second":
            second_in.set()
            assert first_out.wait(60)

    def call():
        with torch.no_grad():
            module(X)

    call()
    module.waiting = waiting
    threads = [threading.Thread(target=call, name=name) for name in ("first", "second")]
    threads[0].start()
    assert first_in.wait(60)
    threads[1].start()
    threads[0].join()
    first_out.set()
    threads[1].join()
    compiled = report_of(module).infer.compile_seconds
    torch.compile(lambda x: torch.sin(x) * 2)(X)
    assert report_of(module).infer.compile_seconds == compiled > 0
    restore(module)


class Resets(Classifier):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 5:
            torch.compiler.reset()


def test_a_compile_after_reset_is_counted_and_is_no_sample():
    callback = InductorCompile("default", None, targets=["net"], baseline_steps=0, verify="off")
    trainer(callback).fit(seeded(Resets), loader(12))
    train = callback.report.train
    assert (train.graphs, train.recompiles) == (2, 1)
    assert [event["reason"] for event in train.diagnostics.events if event["kind"] == "recompile"] == [
        "torch.compiler.reset() discarded the compiled graphs"
    ]
    compiling = [series for series in train.diagnostics.series if series["kind"] == "compiling"]
    assert [series["steps"] for series in compiling] == [[1, 7]]
