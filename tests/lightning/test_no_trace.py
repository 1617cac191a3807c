"""After each entry point the process and the modules are as before, also after an exception."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.callback import callback_handler

from compile_callbacks import CompileReport, CompileWarning, InductorBackend, InductorCompile, compile_phases, restore
from tests.cases.case import attributes, of_process
from tests.support.models import FEATURES, Classifier, RecordingLogger, fit, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def state_of(module: nn.Module) -> Any:
    """What an entry point may change and has to restore, next to the settings and hooks that conftest.py compares."""
    return dict(os.environ), of_process(), [attributes(part) for part in module.modules()]


class Raises(Classifier):
    """Raises a `KeyError` in its third training step and in its second prediction."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch if batch_idx < 2 else {}["training"], batch_idx)

    def predict_step(self, batch, batch_idx):
        return super().predict_step(batch if batch_idx < 1 else {}["prediction"], batch_idx)


@pytest.fixture(scope="module", autouse=True)
def _torch_has_compiled_before():
    """Torch sets environment variables and configs of its own at the first compile of a process."""
    net = mlp()
    with torch._inductor.config.patch(fallback_by_default=True):
        torch.compile(lambda x: net(x).sum())(X).backward()
    torch._dynamo.reset()


def test_trainer_run_leaves_no_more_than_the_same_run_without_the_callback(tmp_path):
    states = []
    for compiles in (False, True):
        module, states_of_run = seeded(Raises), []
        for entry in ("fit", "validate", "predict"):  # that a fit without an exception leaves nothing, cases show
            callbacks = [InductorCompile(baseline_steps=1, cache_dir=tmp_path)] * compiles
            try:
                getattr(trainer(*callbacks), entry)(module, loader(3))
            except KeyError:
                states_of_run.append("raised")
            states_of_run.append(state_of(module))
        states.append(states_of_run)
    assert states[0].count("raised") == 2
    assert states[1] == states[0]


def test_compile_phases_and_backends_leave_no_trace(tmp_path):
    module = mlp()
    before = state_of(module)
    compile_phases(module, cache_dir=tmp_path)
    module(X).sum().backward()
    with torch.no_grad():
        module(X)
    with pytest.raises(RuntimeError, match="shape"):
        module(X[:, :3])
    restore(module)
    assert state_of(module) == before
    backend = InductorBackend().build(module, X)
    backend.infer(X)
    backend.deactivate()
    assert state_of(module.train()) == before


def no_dispatcher(module):
    return all("_compiled_call_impl" not in vars(part) for part in module.modules())


def test_an_exception_at_the_end_of_a_run_leaves_the_module_uncompiled(monkeypatch):
    class Fails(list):
        def remove(self, listener):
            super().remove(listener)
            raise RuntimeError("no more events")

    monkeypatch.setattr(callback_handler, "end_callbacks", Fails())
    module = seeded()
    with pytest.warns(CompileWarning, match="could not end the run: RuntimeError: no more events"):
        trainer(InductorCompile(None, "default", targets=["net"], baseline_steps=0)).validate(module, loader(1))
    assert no_dispatcher(module)


@pytest.mark.parametrize(
    "function",
    ["session.session.Session.begin", "profiling.step_times.PhaseTimes.end", "report.report.CompileReport.scalars"],
)
def test_a_failure_of_the_callbacks_own_work_costs_a_warning_and_the_run_goes_on_eagerly(function, monkeypatch):
    monkeypatch.setattr(f"compile_callbacks.{function}", lambda *args, **kwargs: 1 // 0)
    with pytest.warns(CompileWarning, match=r"ZeroDivisionError.*eager.*CC106") as caught:
        module = fit(InductorCompile(), validation=3, logger=RecordingLogger(), log_every_n_steps=1)
    assert module.losses == fit(validation=3).losses
    assert len([warning for warning in caught if "CC106" in str(warning.message)]) == 1
    assert no_dispatcher(module)


def test_a_report_that_cannot_be_made_does_not_hide_the_exception_of_the_run(monkeypatch):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(CompileReport, "scalars", mock.Mock(side_effect=error))
    module = seeded(Raises)
    with pytest.raises(KeyError, match="training") as raised:
        trainer(InductorCompile(targets=["net"])).fit(module, loader(3))
    (note,) = raised.value.__notes__
    assert "InductorCompile wrote no report: RuntimeError: CUDA error" in note
    assert no_dispatcher(module)
