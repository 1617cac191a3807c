"""Repeated blocks: equal blocks share a graph, and blocks that their author marked are regions of one graph."""

from __future__ import annotations

import pytest
import torch

from compile_callbacks import InductorCompile, compile_phases
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import Classifier
from tests.support.stacks import Block, Stack, blocks

pytestmark = [pytest.mark.usefixtures("no_codegen"), pytest.mark.all_versions]


class Marked(Block):
    forward = torch.compiler.nested_compile_region(Block.forward)


@pytest.mark.parametrize("targets", [None, "net.layers.*"])
def test_blocks_that_the_steps_call_or_that_a_glob_names_share_a_graph(targets):
    class Steps(Classifier):
        def logits(self, x):
            if targets == "net.layers.*":
                return self.net(x)
            x = self.net.embed(x)
            for layer in self.net.layers:
                x = layer(x)
            return self.net.head(x)

    callback = InductorCompile(infer_mode=None, targets=targets, baseline_steps=0)
    assert_fits_as_eager(callback, make=lambda: Steps(Stack(blocks())), train=4, validation=None)
    assert "net.layers.* (4 blocks, one graph)" in callback.report.train.targets


def test_blocks_that_their_author_marked_as_regions_compute_what_eager_computes():
    callback = InductorCompile(infer_mode=None, baseline_steps=0, on_error="raise")
    make = lambda: Classifier(Stack(blocks(kind=Marked)))  # noqa: E731
    assert_fits_as_eager(callback, make=make, train=4, validation=None)
    train = callback.report.train
    assert (train.targets, train.graphs, train.graph_breaks, train.verified) == (("net",), 1, 0, "equal 1")


@pytest.mark.parametrize("use", [InductorCompile, lambda targets: compile_phases(Stack(blocks()), targets=targets)])
def test_targets_repeated_is_refused_with_what_replaces_it(use):
    message = r"targets=\['net\.layers\.\*'\].*background=True.*CC201"
    with pytest.raises(ValueError, match=message):
        use(targets="repeated")
