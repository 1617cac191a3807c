"""Compiled modules with ``torch.distributions`` beyond a run; `tests.cases.test_values` has the runs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributions import Distribution, Normal

from compile_callbacks import InductorBackend, InductorCompile, compile_phases, report_of, restore
from tests.cases.test_values import validation
from tests.cases.zoo import Policy
from tests.support.models import FEATURES, Classifier, fit

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]


def test_a_module_that_stays_compiled_compiles_new_shapes_in_one_graph():
    callback = InductorCompile({"fullgraph": True, "dynamic": False}, None, baseline_steps=0, keep_compiled=True)
    with validation(True, after=False):
        module = fit(callback, make=lambda: Classifier(Policy()), train=2)
        graphs = counters["stats"]["unique_graphs"]
        for size in (5, 6):
            module.net(torch.ones(size, FEATURES)).sum().backward()
    assert counters["stats"]["unique_graphs"] == graphs + 2
    assert callback.report.train.fallbacks == 0
    torch._dynamo.reset()


def test_restore_and_a_backend_restore_the_validation_and_the_users_own_compile_turns_it_off_as_torch_does():
    x = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
    with validation(True, after=False):
        module, backend = compile_phases(Policy()), InductorBackend().build(Policy(), x)
        module(x), backend.infer(x)
        for report in (report_of(module).train, backend.report.infer):
            assert (report.graphs, report.graph_breaks) == (1, 0)
        backend.deactivate()
        restore(module)
        with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
            Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))
        torch.compile(Policy(), backend="eager", fullgraph=True)(x)
        assert not Distribution._validate_args
