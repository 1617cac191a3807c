"""Frozen weights in the infer phase: Inductor really folds them, and they are never stale."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import CompileWarning, InductorBackend, InductorCompile
from tests.support.models import CLASSES, FEATURES, loader, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

FREEZING = {"freezing": True}


def frozen(train="default", **settings):
    return InductorCompile(train, FREEZING, baseline_steps=0, **settings)


def assert_predicts_as_eager(callback, module):
    predicted = torch.cat(trainer(callback).predict(module, images()))
    torch.testing.assert_close(predicted, eager(module), rtol=1e-4, atol=1e-5)


def folded():
    return counters["inductor"]["binary_folding_conv"] + counters["inductor"]["binary_folding"]


def test_predict_folds_weights_once_and_fit_does_not():
    module, callback = Convolutional(), frozen()
    counters.clear()
    trainer(callback).fit(module, images(), images())
    assert folded() == 0
    assert_predicts_as_eager(callback, module)
    assert folded() > 0
    assert not torch._inductor.config.freezing
    graphs = callback.report.infer.graphs
    assert_predicts_as_eager(callback, module)
    trainer(callback).test(module, images(), verbose=False)
    assert callback.report.infer.graphs == graphs


def optimizer_step(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module.train()
    module.net(torch.ones(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def load(module):
    torch.manual_seed(5)
    module.load_state_dict({k: torch.rand_like(v.float()).to(v.dtype) for k, v in module.state_dict().items()})


def edit_through_data(module):
    module.net[0].weight.data.mul_(3)


def swap_through_data(module):
    module.net[0].weight.data = torch.ones_like(module.net[0].weight)


def replace_parameter(module):
    module.net[0].weight = nn.Parameter(2 * torch.ones_like(module.net[0].weight))


def exchange_channels(module):
    weight = module.net[0].weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


def test_changed_weights_are_never_stale():
    module, callback = Convolutional(), frozen()
    assert_predicts_as_eager(callback, module)
    for change in (
        optimizer_step,
        edit_through_data,
        exchange_channels,
        load,
        swap_through_data,
        replace_parameter,
    ):
        before = eager(module)
        change(module)
        assert not torch.allclose(eager(module), before), change
        assert_predicts_as_eager(callback, module)


def test_validation_in_fit_follows_the_weights_without_recompiling_each_epoch():
    reference, module, callback = Convolutional(), Convolutional(), frozen()
    for trained, callbacks in ((reference, ()), (module, (callback,))):
        trainer(*callbacks, max_epochs=4).fit(trained, images(), images())
    torch.testing.assert_close(torch.cat(module.outputs), torch.cat(reference.outputs), rtol=1e-4, atol=1e-4)
    assert callback.report.infer.graphs == 1


def test_freezing_in_training_is_warned_about():
    with pytest.warns(CompileWarning, match="train_mode's option 'freezing' has no effect"):
        InductorCompile(FREEZING, None)


# ------------------------------------------------------------------------------------------ other kinds of weights


class Predicts(pl.LightningModule):
    """Predicts with a network, and edits it before the third batch."""

    def __init__(self, net, edit):
        super().__init__()
        self.net, self.edit = net, edit

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
        return torch.cat(trainer(*callbacks).predict(Predicts(make(), edit), loader(4)))

    callback = frozen(None, targets="net")
    torch.testing.assert_close(predictions(callback), predictions(), rtol=1e-4, atol=1e-5)
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


class Convolutional(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        self.outputs = []

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))

    def test_step(self, batch, batch_idx):
        self.outputs.append(self.net(batch[0]))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def images(batches=2):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(4 * batches, 3, 8, 8, generator=generator)), 4)


def eager(module):
    module = copy.deepcopy(module).eval()
    with torch.no_grad():
        return torch.cat([module.net(batch) for (batch,) in images()])
