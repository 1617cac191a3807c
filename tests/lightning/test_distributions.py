"""The argument validation of ``torch.distributions`` applies in eager code, and compiled code has no graph breaks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import TorchPatcher
from torch._dynamo.utils import counters
from torch.distributions import Categorical, Distribution, Normal

from compile_callbacks import InductorBackend, InductorCompile, compile_phases, report_of, restore
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
BAD = torch.tensor([1.0, -1.0])


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


class Validated(Classifier):
    """Its third training step gives a distribution a negative scale, outside of the compiled network."""

    def __init__(self, net=None):
        super().__init__(net or Policy())

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            Normal(torch.zeros(2), BAD)
        return super().training_step(batch, batch_idx)


def assert_validates():
    assert Distribution._validate_args
    with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        Normal(torch.zeros(2), BAD)


@pytest.mark.parametrize("keep_compiled", [False, True])
def test_an_error_of_eager_code_is_raised_as_without_the_callback(keep_compiled):
    callback = InductorCompile(targets=["net"], baseline_steps=0, keep_compiled=keep_compiled)
    with pytest.raises(ValueError, match="to satisfy the constraint GreaterThan"):
        fit(callback, make=Validated)
    assert callback.report.train.verified == "equal 1"
    assert_validates()
    if keep_compiled:
        torch._dynamo.reset()


def test_compiled_code_builds_distributions_in_one_graph_and_does_not_recompile():
    module = Policy()
    compile_phases(module, verify="raise")
    expected = Policy.forward(module, X)
    for _ in range(3):
        torch.testing.assert_close(module(X), expected)
        with torch.no_grad():
            torch.testing.assert_close(module(X), expected)
        assert_validates()
    report = report_of(module)
    for phase in (report.train, report.infer):
        assert (phase.graphs, phase.recompiles, phase.graph_breaks, phase.fallbacks) == (1, 0, 0, 0)
    restore(module)


def test_a_module_that_stays_compiled_compiles_new_shapes_in_one_graph():
    callback = InductorCompile({"fullgraph": True, "dynamic": False}, None, baseline_steps=0, keep_compiled=True)
    module = fit(callback, make=lambda: Classifier(Policy()), train=2)
    graphs = counters["stats"]["unique_graphs"]
    for size in (5, 6):
        module.net(torch.ones(size, FEATURES)).sum().backward()
        assert_validates()
    assert counters["stats"]["unique_graphs"] == graphs + 2
    assert callback.report.train.fallbacks == 0
    torch._dynamo.reset()


def test_a_distribution_that_compiled_code_returns_validates_its_samples():
    class Returns(Policy):
        def forward(self, x):
            return Categorical(logits=self.net(x))

    module = Returns()
    compile_phases(module)
    distribution = module(X)
    assert report_of(module).train.graphs == 1
    with pytest.raises(ValueError, match="to be within the support"):
        distribution.log_prob(torch.full((4,), CLASSES))
    restore(module)


def test_a_backend_leaves_the_validation_on():
    backend = InductorBackend().build(Policy(), X)
    backend.infer(X)
    assert_validates()
    assert (backend.report.infer.graphs, backend.report.infer.graph_breaks) == (1, 0)
    backend.deactivate()
    assert_validates()


def test_validation_that_the_user_turned_off_stays_off(monkeypatch):
    monkeypatch.setattr(Distribution, "_validate_args", False)
    module = fit(InductorCompile(targets=["net"], baseline_steps=0), make=lambda: Classifier(Policy()), train=2)
    assert not Distribution._validate_args
    trainer(InductorCompile(None, "default", baseline_steps=0)).predict(module, loader(1))
    assert not Distribution._validate_args


def test_the_users_own_compile_turns_the_validation_off_as_torch_does():
    module = Policy()
    compile_phases(module)
    module(X)
    restore(module)
    assert_validates()
    own = torch.compile(Policy(), backend="eager", fullgraph=True)
    own(X)
    assert not Distribution._validate_args
