"""Runs leave the argument validation of ``torch.distributions`` as it was, and compiled code has no graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.utils import counters
from torch.distributions import Distribution, Normal

from compile_callbacks import InductorBackend, InductorCompile, compile_phases, report_of, restore
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


@pytest.fixture(autouse=True)
def _no_compile_before(monkeypatch):
    """Let each test begin as a process that has not called ``torch.compile``."""
    TorchPatcher.patch.cache_clear()
    monkeypatch.setattr(Distribution, "_validate_args", True)
    yield
    TorchPatcher.patch.cache_clear()


class Policy(nn.Module):
    """Builds a distribution in each call, and has one that was built before."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)
        self.prior = Normal(torch.zeros(CLASSES), torch.ones(CLASSES))

    def forward(self, x):
        mean = self.net(x)
        distribution = Normal(mean, mean.exp())
        return mean + distribution.log_prob(2 * mean) + self.prior.log_prob(mean)


@pytest.mark.parametrize("validates", [True, False])
def test_a_run_restores_the_validation_and_a_second_run_does_not_recompile(validates, monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", validates)
    callback = InductorCompile(targets=["net"], baseline_steps=0)
    run, module = trainer(callback), seeded(lambda: Classifier(Policy()))
    for _ in range(2):
        run.fit(module, loader(2), loader(1))
        assert Distribution._validate_args == validates
    for phase in (callback.report.train, callback.report.infer):
        assert (phase.graphs, phase.recompiles, phase.graph_breaks, phase.verified) == (1, 0, 0, "equal 1")


def test_a_module_that_stays_compiled_compiles_new_shapes_in_one_graph():
    callback = InductorCompile({"fullgraph": True, "dynamic": False}, None, baseline_steps=0, keep_compiled=True)
    module = fit(callback, make=lambda: Classifier(Policy()), train=2)
    graphs = counters["stats"]["unique_graphs"]
    for size in (5, 6):
        module.net(torch.ones(size, FEATURES)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs + 2
    assert callback.report.train.fallbacks == 0
    torch._dynamo.reset()


def test_restore_and_a_backend_restore_the_validation_and_the_users_own_compile_turns_it_off_as_torch_does():
    module = compile_phases(Policy())
    backend = InductorBackend().build(Policy(), X)
    module(X), backend.infer(X)
    assert (report_of(module).train.graph_breaks, backend.report.infer.graph_breaks) == (0, 0)
    assert (report_of(module).train.graphs, backend.report.infer.graphs) == (1, 1)
    backend.deactivate()
    restore(module)
    with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))
    torch.compile(Policy(), backend="eager", fullgraph=True)(X)
    assert not Distribution._validate_args
