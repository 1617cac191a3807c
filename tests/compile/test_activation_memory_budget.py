"""``InductorConfig(activation_memory_budget=...)``: what a graph saves for its backward pass."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig
from tests.support.models import Classifier, loader, seeded, trainer
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


def deep():
    layers = [part for _ in range(6) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return Classifier(nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 3)))


def fit(budget):
    module, mode = seeded(deep), InductorConfig(activation_memory_budget=budget)
    callback = InductorCompile(mode, None, passes=[Uncached()], baseline_steps=0)  # a cached graph is not counted
    trainer(callback).fit(module, loader(batch_size=64))
    return module, callback.report.train


def test_a_smaller_budget_saves_less_for_backward_and_computes_the_same():
    eager = seeded(deep)
    trainer().fit(eager, loader(batch_size=64))
    reports = {}
    for budget in (None, 0.5, 0.0):
        module, reports[budget] = fit(budget)
        torch.testing.assert_close(module.losses, eager.losses, rtol=1e-4, atol=1e-5)
        assert torch._functorch.config.activation_memory_budget == 1.0  # in force for our compiles only
    saved = [report.diagnostics.saved_for_backward_mib for report in reports.values()]
    assert saved[0] > saved[1] > saved[2]
    assert "activation_memory_budget=0.5" in str(reports[0.5].mode)
