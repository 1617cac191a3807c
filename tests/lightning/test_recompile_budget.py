"""``new_shapes="auto"``: recompiles have a budget, and no compile begins after SIGTERM or Ctrl-C."""

from __future__ import annotations

import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks.profiling.compile_events import CompileKey, CompileRecorder
from compile_callbacks.runtime import recompile_budget
from compile_callbacks.runtime.recompile_budget import CompileLimits, RecompileBudget
from tests.lightning.test_observed_shapes import Words, words
from tests.support.models import Classifier, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

KEY = CompileKey("net", "train")


@pytest.mark.parametrize(
    ("seconds", "saved", "exhausted"),
    [
        ([100], 0, False),  # the first compile is free
        ([5, 20, 9], 0, False),
        ([5, 20, 11], 0, True),
        ([50, 20, 25], 0, False),  # as long as the first compile
        ([5, 20, 11], 2, False),
        ([5, 20, 11], -2, True),
    ],
)
def test_budget_is_the_first_compile_or_30_seconds_and_what_was_saved(seconds, saved, exhausted):
    recorder = CompileRecorder()
    recorder.compile_seconds[KEY] = seconds
    limits = CompileLimits(seconds_saved=lambda phase: saved)
    budget = RecompileBudget(KEY, recorder, limits, WarnOnce(), bounded=True)
    if exhausted:
        with pytest.warns(CompileWarning, match=r"'net' compiled 2 more graphs in 31 s .* train phase.*CC130"):
            assert not budget.check()
        assert [event.kind for event in recorder.events] == ["budget"]
    else:
        assert budget.check()
    assert budget.exhausted == exhausted


def test_new_shapes_run_eagerly_when_the_budget_is_used_up(monkeypatch):
    monkeypatch.setattr(recompile_budget, "allowed_seconds", lambda first_compile, saved: 0.0)
    sizes = [(4, 5)] * 4 + [(4, 5), (1, 5), (4, 1), (4, 5), (1, 1), (1, 5), (4, 1), (1, 1)]
    settings = {"num_sanity_val_steps": 0}
    eager = seeded(Words)
    trainer(**settings).fit(eager, words(*sizes))
    callback = InductorCompile(infer_mode=None, baseline_steps=1)
    module = seeded(Words)
    with pytest.warns(CompileWarning, match=r"batch size 1.*CC130"):
        trainer(callback, **settings).fit(module, words(*sizes))
    assert callback.report.train.graphs == 2
    assert "recompile budget" in str(callback.report)
    assert module.losses == pytest.approx(eager.losses, rel=1e-4)


class _Breaks(nn.Module):
    """Breaks the graph after each layer but the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.head = (nn.Linear(8, size) for size in (8, 8, 8, 3))

    def forward(self, x):
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        x = self.second(x).relu()
        torch._dynamo.graph_break()
        x = self.third(x).relu()
        torch._dynamo.graph_break()
        return self.head(x)


def test_graphs_behind_graph_breaks_stop_within_a_call(monkeypatch):
    monkeypatch.setattr(recompile_budget, "allowed_seconds", lambda first_compile, saved: 0.0)
    make = lambda: Classifier(_Breaks())  # noqa: E731
    eager = seeded(make)
    trainer().fit(eager, loader())
    callback = InductorCompile(infer_mode=None, baseline_steps=0)
    module = seeded(make)
    with pytest.warns(CompileWarning, match=r"the first of \d graph breaks: .*test_recompile_budget.py"):
        trainer(callback).fit(module, loader())
    assert callback.report.train.graphs == 2
    assert module.losses == pytest.approx(eager.losses, rel=1e-4)


def test_recompile_has_no_budget(monkeypatch):
    monkeypatch.setattr(recompile_budget, "allowed_seconds", lambda first_compile, saved: 0.0)
    callback = InductorCompile(infer_mode=None, baseline_steps=0, new_shapes="recompile")
    trainer(callback).fit(seeded(lambda: Classifier(_Breaks())), loader())
    assert callback.report.train.graphs == 4


class _Stops(Classifier):
    """Is asked to stop in its first step, before it calls the target."""

    how = "sigterm"

    def training_step(self, batch, batch_idx):
        if self.how == "exception":
            raise KeyError("data")
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


class _CallsOnException(pl.Callback):
    def on_exception(self, trainer, module, exception):
        module.net(torch.randn(4, 8))


def test_no_compile_begins_after_sigterm():
    callback = InductorCompile(targets="net", baseline_steps=0)
    with pytest.raises(SystemExit):
        trainer(callback).fit(seeded(_Stops), loader())
    assert callback.report.train.graphs == 0
    assert "asked to stop" in str(callback.report.train.diagnostics.events)


def test_no_compile_begins_after_an_exception(monkeypatch):
    monkeypatch.setattr(_Stops, "how", "exception")
    callback = InductorCompile(targets="net", baseline_steps=0)
    with pytest.raises(KeyError):
        trainer(_CallsOnException(), callback).fit(seeded(_Stops), loader())
    assert callback.report.train.graphs == 0
