"""Graph breaks that a setting of Dynamo removes, and modules that would break graphs or recompile without one."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import FEATURES, Classifier, mlp

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class Item(nn.Module):
    """Multiplies by a number of a tensor, which breaks the graph."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x * (1 + x.abs().max().item()))


def make():
    return Classifier(Item())


def test_a_setting_of_dynamo_is_in_effect_for_our_compiles_only():
    callback = InductorCompile({"dynamo": {"capture_scalar_outputs": True}}, None, baseline_steps=0)
    assert_fits_as_eager(callback, make=make)
    train = callback.report.train
    assert (train.graphs, train.graph_breaks) == (1, 0)
    assert train.verified == "equal 1"
    assert not torch._dynamo.config.capture_scalar_outputs
    of_user = torch._dynamo.explain(Item())(torch.ones(2, FEATURES))
    assert of_user.graph_break_count == 1
