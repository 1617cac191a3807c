"""Repeated blocks: equal blocks share a graph, and blocks that their author marked are regions of one graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile, compile_phases
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import CLASSES, FEATURES, Classifier, Wrapper

pytestmark = [pytest.mark.usefixtures("no_codegen"), pytest.mark.all_versions]


class Block(Wrapper):
    def __init__(self):
        super().__init__(nn.Sequential(nn.LayerNorm(FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU()))

    def forward(self, x):
        return x + self.net(x)


class Marked(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


def stack(kind=Block):
    blocks = nn.Sequential(*(kind() for _ in range(4)))
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), blocks, nn.Linear(FEATURES, CLASSES))


def test_blocks_that_a_glob_names_share_a_graph():
    """test_target_search.py has blocks that the steps call."""
    callback = InductorCompile(infer_mode=None, targets="net.1.*", baseline_steps=0)
    assert_fits_as_eager(callback, make=lambda: Classifier(stack()), train=4, validation=None)
    assert callback.report.train.targets == ("net.1.* (4 blocks, one graph)",)


def test_blocks_that_their_author_marked_as_regions_compute_what_eager_computes():
    callback = InductorCompile(infer_mode=None, baseline_steps=0, on_error="raise")
    assert_fits_as_eager(callback, make=lambda: Classifier(stack(Marked)), train=4, validation=None)
    train = callback.report.train
    assert (train.targets, train.graphs, train.graph_breaks, train.verified) == (("net",), 1, 0, "equal 1")


@pytest.mark.parametrize("use", [InductorCompile, lambda targets: compile_phases(stack(), targets=targets)])
def test_targets_repeated_is_refused_with_what_replaces_it(use):
    message = r"targets=\['net\.layers\.\*'\].*background=True.*CC201"
    with pytest.raises(ValueError, match=message):
        use(targets="repeated")
