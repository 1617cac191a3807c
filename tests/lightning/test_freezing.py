"""Frozen and folded weights in the infer phase: Inductor really folds them, and they are never stale."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import InductorBackend, InductorCompile, InductorConfig
from tests.support.against_eager import FLOAT32, assert_fits_as_eager, assert_same_values
from tests.support.models import CLASSES, FEATURES, Classifier, fit, loader, trainer

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
@pytest.mark.filterwarnings("ignore:freezing has no effect on target 'net' in the infer phase. 'adjacency'")
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


def test_weights_of_a_tensor_subclass_are_frozen_and_follow_an_edit():
    x = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
    module = Subclass()
    backend = InductorBackend(FREEZING, on_error="raise").build(module, x)
    for factor in (1, 3):
        with torch.no_grad():
            module.linear.weight.mul_(factor)
            torch.testing.assert_close(backend.infer(x), module.linear(x).a)
    assert backend.report.infer.graphs == 2


def test_frozen_weights_of_a_tensor_subclass_can_be_moved_and_swapped():
    callback, module = frozen(None), Classifier(Subclass())
    for _ in range(2):
        predicted = torch.cat(trainer(callback).predict(module, loader(2)))  # at its end, Lightning calls module.cpu()
        torch.testing.assert_close(predicted, predicted_eagerly(module), **FLOAT32)
    assert (callback.report.infer.graphs, callback.report.infer.verified) == (1, "equal 1")
    backend = InductorBackend(FREEZING, on_error="raise").build(module.net, x := torch.ones(4, FEATURES))
    torch.testing.assert_close(backend.infer(x), module.net(x))
    weight = module.net.linear.weight
    other = nn.Parameter(TwoTensor(2 * weight.a, 2 * weight.b), requires_grad=False)
    torch.utils.swap_tensors(weight, other)
    with torch.no_grad():
        torch.testing.assert_close(backend.infer(x), module.net._call_impl(x), **FLOAT32)


# ------------------------------------------------------------------------------------------ weight folding


EPOCHS = 5
FOLDS = InductorConfig(fold_weights=True)


def ours(train_mode="default", infer_mode=FOLDS, **kwargs):
    # Verification restores what an eager call changes, buffers among it: a change like any other to folded weights.
    return InductorCompile(train_mode, infer_mode, baseline_steps=0, verify="off", **kwargs)


def assert_validation_follows_the_weights(callback, company, close=FLOAT32, *, ours_first=True, **settings):
    """Train next to another callback, with refreshed weights in each validation; the sanity check is eager."""
    theirs = company()
    callbacks = (callback, theirs) if ours_first else (theirs, callback)
    settings["max_epochs"] = EPOCHS
    assert_same_values(fit(*callbacks, **settings), fit(company(), **settings), close)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.fallbacks) == (1, 0, 0)
    assert infer.diagnostics.weight_refreshes == EPOCHS


class EditsBeforeValidation(pl.Callback):
    """Validates with other weights, which user code sets through ``.data``: torch keeps no record of it."""

    def __init__(self, edit=lambda parameter: parameter.data.mul_(1.5)):
        self.edit = edit

    def on_validation_start(self, trainer, pl_module):
        self.before = {name: p.data.clone() for name, p in pl_module.named_parameters()}
        for parameter in pl_module.parameters():
            self.edit(parameter)

    def on_validation_end(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.before[name])


def swap(parameter):
    parameter.data = parameter.data * 1.5


def averaging():
    if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    return lightning_callbacks.EMAWeightAveraging(decay=0.7)


@pytest.mark.parametrize(
    ("company", "ours_first"),
    [(EditsBeforeValidation, True), (lambda: EditsBeforeValidation(swap), False), (averaging, False)],
)
def test_validation_follows_weights_that_other_callbacks_change(company, ours_first):
    assert_validation_follows_the_weights(ours(), company, ours_first=ours_first)


class ValidatesAsItTrains(Classifier):
    """Calls the module without gradients after each optimizer step, as GANs and self-distillation do."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.eval()
        with torch.no_grad():
            self.validation_outputs.append(self.net(batch[0]))
        self.train()


def test_fused_optimizer_steps_are_seen_within_a_stage():
    callback = ours(FOLDS)
    hooks = set(_global_optimizer_post_hooks)
    assert_fits_as_eager(callback, make=ValidatesAsItTrains, max_epochs=2)
    assert callback.report.train.diagnostics.weight_refreshes == 2 * 8
    assert set(_global_optimizer_post_hooks) <= hooks


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["default", "reduce-overhead"])
@pytest.mark.parametrize("company", [EditsBeforeValidation, averaging])
def test_validation_on_a_gpu_follows_the_weights(company, name, precision):
    settings = {"accelerator": "cuda", "precision": precision}
    full = precision == "32-true"
    # Steps that round differently to bfloat16 drift apart.
    callback = ours(name if full else None, InductorConfig(mode=name, fold_weights=True))
    close = {"rtol": 1e-3, "atol": 1e-3} if full else {"rtol": 2e-2, "atol": 2e-2}
    assert_validation_follows_the_weights(callback, company, close, **settings)
    assert callback.report.infer.diagnostics.folded_mib > 0


def test_a_module_that_stays_compiled_follows_its_weights():
    module = fit(ours(targets=["net"], keep_compiled=True)).eval()
    x = torch.randn(4, FEATURES)

    def assert_equal():
        with torch.no_grad():
            torch.testing.assert_close(module(x), module.net._call_impl(x), rtol=1e-4, atol=1e-5)

    assert_equal()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=True)
    module(x).square().mean().backward()
    optimizer.step()
    assert_equal()
    module.train()(x)  # the compiled graph changes running statistics
    module.eval()
    assert_equal()
    module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert_equal()
    torch._dynamo.reset()
