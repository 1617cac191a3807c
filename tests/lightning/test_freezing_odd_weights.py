"""Frozen weights that are no plain dense tensors."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import CompileWarning, InductorBackend, InductorCompile
from tests.support.models import CLASSES, FEATURES, loader, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]

FREEZING = {"freezing": True}


class Predicts(pl.LightningModule):
    """Predicts with a network, and calls ``edit`` on it before the third batch."""

    def __init__(self, net: nn.Module, edit=lambda net: None) -> None:
        super().__init__()
        self.net, self.edit = net, edit

    def predict_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.edit(self.net)
        return self.net(batch[0])


def predictions(make, edit, *callbacks) -> torch.Tensor:
    torch.manual_seed(1)  # lazy weights are made in the first call
    return torch.cat(trainer(*callbacks).predict(Predicts(make(), edit), loader(4)))


def assert_predicts_as_eager(make, edit=lambda net: None) -> InductorCompile:
    callback = InductorCompile(None, FREEZING, targets="net", baseline_steps=0)
    expected = predictions(make, edit)
    torch.testing.assert_close(predictions(make, edit, callback), expected, rtol=1e-4, atol=1e-5)
    return callback


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(CLASSES))


def edit_lazy(net):
    with torch.no_grad():
        net[0].weight.mul_(3)


@pytest.mark.parametrize("edit", [lambda net: None, edit_lazy])
def test_lazy_weights_are_frozen_once_they_are_made(edit):
    callback = assert_predicts_as_eager(lazy, edit)
    assert callback.report.infer.graphs >= 1
    assert callback.report.infer.fallbacks == 0


class Sparse(nn.Module):
    """Multiplies with a sparse buffer."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(FEATURES, CLASSES)
        dense = torch.eye(FEATURES) * 2
        self.register_buffer("adjacency", dense.to_sparse_coo() if layout == "coo" else dense.to_sparse_csr())

    def forward(self, x):
        return self.linear((self.adjacency @ x.t()).t())


def scale(net):
    net.adjacency.mul_(3)


def replace(net):
    net.adjacency = net.adjacency * 5


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:target 'net' runs eagerly in the infer phase")  # torch compiles none with CSR
@pytest.mark.parametrize("edit", [lambda net: None, scale, replace])
@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_buffers_do_not_end_predict(layout, edit):
    assert_predicts_as_eager(lambda: Sparse(layout), edit)


class Subclass(nn.Module):
    """Its weight is a tensor around two others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
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


class OneDnn(nn.Linear):
    """Holds a buffer whose memory torch shows to nobody."""

    def __init__(self) -> None:
        super().__init__(FEATURES, CLASSES)
        self.register_buffer("packed", torch.ones(3).to_mkldnn())

    def forward(self, x):
        return super().forward(x)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")
def test_freezing_is_left_out_if_a_buffer_cannot_be_read():
    x = torch.ones(4, FEATURES)
    with pytest.warns(CompileWarning, match="no effect on target 'forward' in the infer phase: 'packed'"):
        backend = InductorBackend(FREEZING).build(OneDnn(), x)
    assert backend.infer(x).shape == (4, CLASSES)
    assert backend.report.infer.graphs == 1
    backend.deactivate()
