"""Short fits, and a wrong graph pass, for the tests of `export` and `AOTInductorExport`."""

from __future__ import annotations

import copy

import torch

from compile_callbacks import graph_pass
from tests.support.models import Classifier, loader, seeded, trainer


def fit(*callbacks, make=Classifier, **settings):
    module = seeded(make)
    trainer(*callbacks, **{"max_epochs": 2, **settings}).fit(module, loader(), loader(2, seed=2))
    return module


def expected(module, x):
    with torch.no_grad():
        return copy.deepcopy(module.net).eval()(x)


@graph_pass
def negate_output(graph, is_inference):
    """Wrong on purpose."""
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        [value] = output.args[0]
        output.args = ([graph.call_function(torch.ops.aten.neg.default, (value,))],)
