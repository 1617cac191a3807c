"""The end of a run, also by an exception; and what a step that compiles leaves behind."""

from __future__ import annotations

import gc

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.runtime.session import Session
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        raise ValueError("the user's own")


def no_dispatcher(module):
    return all("_compiled_call_impl" not in vars(part) for part in module.modules())


def test_an_exception_at_the_end_of_a_run_leaves_the_module_uncompiled(monkeypatch):
    stop = CompileRecorder.stop

    def stop_and_fail(recorder):
        stop(recorder)
        raise RuntimeError("no more events")

    monkeypatch.setattr(CompileRecorder, "stop", stop_and_fail)
    module = seeded()
    with pytest.warns(CompileWarning, match="could not clean up after the run: RuntimeError: no more events"):
        trainer(InductorCompile(None, "default", targets=["net"], baseline_steps=0)).validate(module, loader(1))
    assert no_dispatcher(module)


def test_a_report_that_cannot_be_made_does_not_hide_the_exception_of_the_run(monkeypatch):
    def report(session):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Session, "report", report)
    module = seeded(Failing)
    with pytest.raises(ValueError, match="the user's own") as raised:
        trainer(InductorCompile(targets=["net"])).fit(module, loader(1))
    (note,) = raised.value.__notes__
    assert "InductorCompile wrote no report: RuntimeError: CUDA error" in note
    assert no_dispatcher(module)


def test_a_module_that_stays_compiled_compiles_after_an_exception():
    module, callback = seeded(Failing), InductorCompile(targets=["net"], baseline_steps=0, keep_compiled=True)
    run = trainer(callback)  # kept alive, because it remains interrupted
    with pytest.raises(ValueError, match="the user's own"):
        run.fit(module, loader(1))
    with torch.no_grad():
        module.net(torch.randn(4, FEATURES))
    assert (callback.report.infer.verified, callback.report.infer.fallbacks) == ("equal 1", 0)
    torch._dynamo.reset()


class Collections(Callback):
    """Records after which steps Python collects all garbage before the next step begins."""

    def __init__(self):
        self.step, self.steps = None, []

    def on_fit_start(self, trainer, pl_module):
        gc.callbacks.append(self.collected)

    def teardown(self, trainer, pl_module, stage):
        gc.callbacks.remove(self.collected)

    def on_train_batch_start(self, *args):
        self.step = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.step = batch_idx

    def collected(self, phase, info):
        if phase == "stop" and info["generation"] == 2 and self.step is not None:
            self.steps.append(self.step)


def test_garbage_is_collected_after_a_step_that_compiled_and_not_in_a_sample():
    collections = Collections()
    ours = InductorCompile("default", None, targets=["net"], baseline_steps=2, verify="off")
    fit(collections, ours, train=12)
    assert collections.steps == [4]  # two warm-up steps, two of the baseline, then the step that compiles


def test_copies_of_buffers_live_no_longer_than_the_call_that_compiles():
    class Buffered(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)
            self.register_buffer("table", torch.zeros(777, 3))

        def forward(self, x):
            return self.linear(x) + self.table.mean(0)

    class Counts(Callback):
        found = ()

        def on_train_batch_end(self, *args):
            shapes = [value.shape for value in gc.get_objects() if type(value) is torch.Tensor]
            self.found += (shapes.count((777, 3)),)

    counts = Counts()
    ours = InductorCompile("default", None, targets=["net"], baseline_steps=0, verify="off")
    fit(counts, ours, make=lambda: Classifier(Buffered()), train=2)
    assert counts.found == (1, 1)
