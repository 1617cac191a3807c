"""Targets in an activation checkpoint: its forward pass and its recomputation must run the same code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compile_callbacks import CompileWarning, compile_phases, report_of, restore
from tests.support.models import FEATURES
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.all_versions


class Broken(nn.Module):
    """Two graphs, and only the second one has a ReLU."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, FEATURES)

    def forward(self, x):
        hidden = torch.tanh(self.first(x)) * torch.sigmoid(x)[:, :1]
        torch._dynamo.graph_break()
        return torch.relu(self.second(hidden))


def gradients(net, *batches):
    """The gradients of one step that calls the net in a checkpoint for each batch."""
    net.zero_grad()
    outputs = [checkpoint(net, batch, use_reentrant=False) for batch in batches]
    sum(output.square().sum() for output in outputs).backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


@pytest.fixture
def both():
    """Compiles a copy of a module, and undoes it after the test."""
    made = []

    def both(net, **settings):
        made.append(compile_phases(copy.deepcopy(net), **settings))
        return made[-1], net

    yield both
    for net in made:
        restore(net)


@pytest.mark.parametrize(
    ("make_net", "sizes", "wrong_sizes"),
    [(lambda: nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU()), (8, 5, 8), (5,)), (Broken, (8,), ())],
    ids=["of a later call", "behind a graph break"],
)
def test_a_graph_that_differs_does_not_change_what_a_checkpoint_recomputes(both, make_net, sizes, wrong_sizes):
    wrong = WrongForward("train", *wrong_sizes)
    ours, eager = both(make_net(), passes=[wrong], verify="eager", train_mode={"dynamic": False})
    batches = [torch.randn(size, FEATURES) for size in sizes]
    with pytest.warns(CompileWarning, match="it runs eagerly from here on"):
        found = gradients(ours, *batches)
    torch.testing.assert_close(found, gradients(eager, *batches))
    torch.testing.assert_close(gradients(ours, *batches), gradients(eager, *batches))
    assert report_of(ours).train.fallbacks == 1


def test_a_shape_that_returns_is_not_compiled_within_a_checkpoint(both):
    net = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU())
    ours, eager = both(net, new_shapes="eager", train_mode={"dynamic": False})
    for size in (8, 5, 5, 5, 5, 5, 5):
        batch = torch.randn(size, FEATURES)
        torch.testing.assert_close(gradients(ours, batch), gradients(eager, batch))
    assert report_of(ours).train.graphs == 1
