"""Frozen weights in the infer phase: Inductor really folds them, and they are never stale."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import CompileWarning, InductorCompile, Tune
from tests.support.against_eager import FLOAT32, assert_fits_as_eager
from tests.support.memory import tensor_elements, without_automatic_collection
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

FREEZING = {"freezing": True}


def frozen(train="default", **settings):
    return InductorCompile(train, FREEZING, baseline_steps=0, **settings)


def convolutional():
    """A classifier with a convolution, into which Inductor folds the batch norm."""
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 8, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, CLASSES)
    return Classifier(nn.Sequential(nn.Unflatten(1, (2, 2, 2)), *layers))


def predicted_eagerly(module):
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        return torch.cat([module.net(x) for x, _ in loader(2)])


def assert_predicts_as_eager(callback, module):
    predicted = torch.cat(trainer(callback).predict(module, loader(2)))
    torch.testing.assert_close(predicted, predicted_eagerly(module), **FLOAT32)


def folded():
    return counters["inductor"]["binary_folding_conv"] + counters["inductor"]["binary_folding"]


def test_predict_folds_weights_once_and_fit_does_not():
    module, callback = convolutional(), frozen()
    counters.clear()
    trainer(callback).fit(module, loader(2), loader(2))
    assert folded() == 0
    assert_predicts_as_eager(callback, module)
    assert folded() > 0
    assert not torch._inductor.config.freezing
    graphs = callback.report.infer.graphs
    assert_predicts_as_eager(callback, module)
    trainer(callback).test(module, loader(2), verbose=False)
    assert callback.report.infer.graphs == graphs


@pytest.mark.codegen
def test_earlier_frozen_weights_are_freed():
    module = Classifier(nn.Sequential(nn.Linear(FEATURES, 64), nn.Linear(64, CLASSES)))
    callback, elements = frozen(None), []
    with without_automatic_collection():
        for _ in range(4):
            assert_predicts_as_eager(callback, module)
            elements.append(tensor_elements())
            module.net[-1].weight.data.mul_(2)
    assert callback.report.infer.graphs == 4
    assert elements[-1] == elements[1]


def optimizer_step(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module.train()
    module.net(torch.ones(2, FEATURES)).square().mean().backward()
    optimizer.step()


def load(module):
    torch.manual_seed(5)
    module.load_state_dict({k: torch.rand_like(v.float()).to(v.dtype) for k, v in module.state_dict().items()})


def edit_through_data(module):
    module.net[1].weight.data.mul_(3)


def swap_through_data(module):
    module.net[1].weight.data = torch.ones_like(module.net[1].weight)


def replace_parameter(module):
    module.net[1].weight = nn.Parameter(2 * torch.ones_like(module.net[1].weight))


def exchange_channels(module):
    weight = module.net[1].weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


def test_changed_weights_are_never_stale():
    module, callback = convolutional(), frozen()
    assert_predicts_as_eager(callback, module)
    for change in (optimizer_step, edit_through_data, exchange_channels, load, swap_through_data, replace_parameter):
        before = predicted_eagerly(module)
        change(module)
        assert not torch.allclose(predicted_eagerly(module), before), change
        assert_predicts_as_eager(callback, module)


def test_validation_in_fit_follows_the_weights_without_recompiling_each_epoch():
    callback = frozen()
    assert_fits_as_eager(callback, make=convolutional, train=2, max_epochs=4)
    assert callback.report.infer.graphs == 1
    (line,) = (line for line in str(callback.report).splitlines() if line.startswith("infer "))
    assert line.endswith("; freezing has no effect while weights may change, as during fit")


class Layers(Classifier):
    """Calls its layers one after another, so that they share a graph."""

    def __init__(self):
        layers = (nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()) for _ in range(4))
        super().__init__(nn.ModuleList(layers))

    def test_step(self, batch):
        x = batch[0]
        for layer in self.net:
            x = layer(x)


def test_targets_that_share_a_graph_are_not_frozen_and_the_report_says_why():
    callback = InductorCompile("default", FREEZING, baseline_steps=1, targets=["net.*"])
    with pytest.warns(CompileWarning, match="repeated blocks share a graph, but not their weights") as warned:
        trainer(callback).test(Layers(), loader(2), verbose=False)
    assert len([warning for warning in warned if warning.category is CompileWarning]) == 1
    (line,) = (line for line in str(callback.report).splitlines() if line.startswith("infer "))
    assert "repeated blocks share a graph, but not their weights" in line


def test_a_candidate_that_cannot_freeze_is_named_in_its_own_events_only():
    callback = InductorCompile(None, Tune(["default", "freezing"], steps=5), targets=["net.*"])
    trainer(callback).test(Layers(), loader(40), verbose=False)  # without a warning, which would be an error
    events = [event for event in callback.report.infer.diagnostics.events if event["kind"] == "freezing"]
    assert {event.get("candidate") for event in events} <= {"freezing"}
    assert len(callback.session._recorder.events_of("infer", "freezing")) == 1


class TrainsInTest(Classifier):
    """Takes an optimizer step in each test step."""

    def test_step(self, batch, batch_idx):
        x, y = batch
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self.net(x), y)
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
        self.losses.append(self.net(x).square().mean().item())


@pytest.mark.parametrize("baseline_steps", [0, 5])
def test_a_stage_whose_steps_change_the_weights_runs_unfrozen_after_the_second_refreeze(baseline_steps):
    def test(callback=None):
        module = seeded(TrainsInTest)
        trainer(*filter(None, [callback]), inference_mode=False).test(module, loader(30), verbose=False)
        return module

    callback = InductorCompile(None, FREEZING, baseline_steps=baseline_steps)
    with pytest.warns(CompileWarning, match="'net' was compiled 3 times, and runs without frozen weights") as warned:
        module = test(callback)
    assert ["without frozen weights" in str(warning.message) for warning in warned].count(True) == 1
    assert module.losses == pytest.approx(test().losses, rel=1e-4)
    graphs = callback.report.infer.graphs
    assert graphs <= 8  # with and without gradients: three times frozen, and once unfrozen
    assert "freezing has no effect in a stage whose steps change the weights" in str(callback.report)
    for _ in range(2):  # the next stage freezes, and keeps the code
        assert_predicts_as_eager(callback, module)
        assert callback.report.infer.graphs == graphs + 1


# ------------------------------------------------------------------------------------------ other kinds of weights


class Edited(Classifier):
    """Edits its network before the third batch of a prediction."""

    def __init__(self, net, edit):
        super().__init__(net)
        self.edit = edit

    def predict_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.edit(self.net)
        return self.net(batch[0])


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("adjacency", (torch.eye(FEATURES) * 2).to_sparse_coo())

    def forward(self, x):
        return self.linear((self.adjacency @ x.t()).t())


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(CLASSES))


@torch.no_grad()
def edit_lazy(net):
    net[0].weight.mul_(3)


def scale(net):
    net.adjacency.mul_(3)


# torch compiles no graph with sparse tensors
@pytest.mark.filterwarnings("ignore:target 'net' ran in the infer phase without a compiled graph")
@pytest.mark.filterwarnings("ignore:freezing has no effect on target 'net' in the infer phase. '(adjacency|0.weight)'")
@pytest.mark.parametrize(("make", "edit"), [(lazy, edit_lazy), (Sparse, scale)])
def test_lazy_and_sparse_weights_predict_as_eager(make, edit):
    def predictions(*callbacks):
        torch.manual_seed(1)  # lazy weights are initialized in the first call
        return torch.cat(trainer(*callbacks).predict(Edited(make(), edit), loader(4)))

    callback = frozen(None, targets="net")
    torch.testing.assert_close(predictions(callback), predictions(), **FLOAT32)
    if make is lazy:
        assert callback.report.infer.graphs >= 1
        assert callback.report.infer.fallbacks == 0


class Subclass(nn.Module):
    """Its weight is a tensor subclass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        weight = self.linear.weight.detach()
        self.linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)

    def forward(self, x):
        return self.linear(x).a


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching")
def test_weights_of_a_tensor_subclass_are_not_frozen():
    callback, module = frozen(None, targets="net"), Classifier(Subclass())
    with pytest.warns(CompileWarning, match="freezing has no effect.*'linear.weight' is a tensor subclass"):
        predicted = torch.cat(trainer(callback).predict(module, loader(2)))
    torch.testing.assert_close(predicted, predicted_eagerly(module), **FLOAT32)
    assert (callback.report.infer.graphs, callback.report.infer.fallbacks) == (1, 0)
