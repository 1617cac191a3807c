"""Weights that change between steps, and weights that Inductor freezes in the infer phase, which are never stale."""

from __future__ import annotations

import copy
from unittest.mock import ANY

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch._dynamo.utils import counters

from compile_callbacks import CompileWarning, InductorCompile
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.support.memory import tensor_elements, without_automatic_collection
from tests.support.models import CLASSES, FEATURES, FLOAT32, Classifier, assert_fits_as_eager, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

FREEZING, TRAIN = {"freezing": True}, {"infer_mode": None}


def changed(changes, **layers):
    return lambda: zoo.ChangesLayers(changes, **layers)


blocks = changed(zoo.BLOCK_CHANGES, a=zoo.block, b=zoo.block, c=zoo.block)
SHARED = {"train_mode": None, "infer_mode": FREEZING, "baseline_steps": 1, "targets": ["list.net.*"]}
SAID = {"codes": ("CC204",), "says": "repeated blocks share a graph, but not their weights"}
CHANGED = {f"train.{name}": ANY for name in ("graphs", "graph_breaks", "recompiles", "diagnostics.eager_calls")}
WHOLE, EACH = ({**TRAIN, "targets": [targets]} for targets in ("logits", "[abc]"))
CASES = [
    Case(name="blocks", make=blocks, train=(4,) * 20, callback=WHOLE, expect=CHANGED),
    Case(name="blocks that share a graph", make=blocks, train=(4,) * 12, callback=EACH, expect=CHANGED),
    Case(name="frozen blocks", make=zoo.layers, callback=SHARED, expect={"infer.graphs": 3}, **SAID),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_changing_weights_compute_what_eager_computes(case):
    callback = check(case)
    assert ("freezing has no effect" in str(callback.report)) == bool(case.says)


def frozen(train="default", **settings):
    return InductorCompile(train, FREEZING, baseline_steps=0, **settings)


def predicted_eagerly(module):
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        return torch.cat([module.net(x) for x, _ in loader(2)])


def assert_predicts_as_eager(callback, module):
    predicted = torch.cat(trainer(callback).predict(module, loader(2)))
    torch.testing.assert_close(predicted, predicted_eagerly(module), **FLOAT32)


def folded():
    return counters["inductor"]["binary_folding_conv"] + counters["inductor"]["binary_folding"]


def optimizer_step(module):
    module.net(torch.ones(2, FEATURES)).square().mean().backward()
    torch.optim.SGD(module.parameters(), 0.5).step()


CHANGES = (
    optimizer_step,
    lambda m: m.net[1].weight.data.mul_(3),
    lambda m: m.net[1].weight.data.copy_(m.net[1].weight.detach().flip(0)),
    lambda m: m.load_state_dict({k: torch.rand_like(v.float()).to(v.dtype) for k, v in m.state_dict().items()}),
    lambda m: setattr(m.net[1].weight, "data", torch.ones_like(m.net[1].weight)),
    lambda m: setattr(m.net[1], "weight", nn.Parameter(2 * torch.ones_like(m.net[1].weight))),
)


def test_predict_folds_weights_once_and_after_each_change_and_fit_does_not():
    callback = frozen()
    counters.clear()
    module = assert_fits_as_eager(callback, make=net(zoo.convolutional), train=2, max_epochs=4)
    assert (callback.report.infer.graphs, folded()) == (1, 0)
    (line,) = (line for line in str(callback.report).splitlines() if line.startswith("infer "))
    assert line.endswith("; freezing has no effect while weights may change, as during fit")
    assert_predicts_as_eager(callback, module)
    assert folded() > 0
    assert not torch._inductor.config.freezing
    graphs = callback.report.infer.graphs
    assert_predicts_as_eager(callback, module)
    trainer(callback).test(module, loader(2), verbose=False)
    assert callback.report.infer.graphs == graphs
    for number, change in enumerate(CHANGES):
        before = predicted_eagerly(module)
        change(module)
        assert not torch.allclose(predicted_eagerly(module), before), number
        assert_predicts_as_eager(callback, module)


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


class TrainsInPredict(Classifier):
    """Takes an optimizer step in each step of a prediction."""

    def predict_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        torch._foreach_sub_(list(self.net.parameters()), gradients, alpha=0.1)
        return self.net(batch[0])


class Ensemble(Classifier):
    """Predicts with two sets of weights, which `vector_to_parameters` assigns to ``.data``."""

    def predict_step(self, batch, batch_idx):
        weights, outputs = nn.utils.parameters_to_vector(self.net.parameters()).detach(), []
        for factor in (1.0, 0.5):
            nn.utils.vector_to_parameters(weights * factor, self.net.parameters())
            outputs.append(self.net(batch[0]))
        nn.utils.vector_to_parameters(weights, self.net.parameters())
        return torch.stack(outputs)


@pytest.mark.parametrize("baseline_steps", [0, 5])
@pytest.mark.parametrize("make", [TrainsInPredict, Ensemble])
def test_steps_that_change_the_weights_run_unfrozen_for_the_rest_of_the_run(make, baseline_steps):
    callback = InductorCompile(None, FREEZING, baseline_steps=baseline_steps)
    module, eager = seeded(make), seeded(make)
    with pytest.warns(CompileWarning, match="target 'net' runs without frozen weights") as warned:
        outputs = trainer(callback, inference_mode=False).predict(module, loader(16))
    assert ["without frozen weights" in str(warning.message) for warning in warned].count(True) == 1
    torch.testing.assert_close(outputs, trainer(inference_mode=False).predict(eager, loader(16)), **FLOAT32)
    graphs = callback.report.infer.graphs
    assert graphs <= 4  # with and without gradients: once frozen, and once unfrozen
    assert "freezing has no effect on steps that change the weights" in str(callback.report)


def test_weights_with_another_dtype_fit_no_graph_of_an_earlier_stage():
    module = Classifier(nn.Sequential(nn.Embedding(9, FEATURES), nn.Linear(FEATURES, CLASSES)))
    callback = InductorCompile(None, baseline_steps=0)
    for eager_calls, dtype in ((0, torch.float32), (2, torch.float64)):
        tokens = torch.utils.data.DataLoader([(torch.arange(4), 0)] * 2, batch_size=None)
        outputs = trainer(callback).predict(module.to(dtype), tokens)
        assert [output.dtype for output in outputs] == [dtype] * 2
        assert sum(callback.report.infer.diagnostics.eager_calls.values()) == eager_calls


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(CLASSES))


@pytest.mark.filterwarnings("ignore:TwoTensor does not implement _stable_hash_for_caching")
@pytest.mark.parametrize(
    ("make", "edit", "message"),
    [
        (lazy, lambda net: net[0].weight, "'0.weight'"),
        (zoo.tensor_subclass, lambda net: net[2].bias, "'0.weight' is a TwoTensor"),
    ],
)
def test_other_kinds_of_weights_predict_as_eager_and_are_not_frozen(make, edit, message):
    def edit_before_third_batch(trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            edit(pl_module.net).mul_(3)

    def predictions(*callbacks):
        torch.manual_seed(1)  # lazy weights are initialized in the first call
        edits = LambdaCallback(on_predict_batch_start=edit_before_third_batch)
        return torch.cat(trainer(*callbacks, edits, inference_mode=False).predict(Classifier(make()), loader(4)))

    callback = frozen(None, targets="net")
    with pytest.warns(CompileWarning, match=f"freezing has no effect.*{message}"):
        ours = predictions(callback)
    torch.testing.assert_close(ours, predictions(), **FLOAT32)
    assert (callback.report.infer.graphs, callback.report.infer.fallbacks) == (1, 0)
