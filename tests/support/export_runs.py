"""A short fit for the tests of `AOTInductorExport`."""

from __future__ import annotations

import copy

import torch

from tests.support.models import Classifier, loader, seeded, trainer


def fit(*callbacks, make=Classifier, **settings):
    module = seeded(make)
    trainer(*callbacks, **{"max_epochs": 2, **settings}).fit(module, loader(), loader(2, seed=2))
    return module


def expected(module, x):
    with torch.no_grad():
        return copy.deepcopy(module.net).eval()(x)
