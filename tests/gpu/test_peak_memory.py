"""The callback and the user's own measurement of GPU memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.models import CLASSES, FEATURES, Classifier, loader, seeded, trainer

pytestmark = pytest.mark.gpu


def test_the_users_own_peak_is_that_of_the_whole_run():
    def wide():
        return nn.Sequential(nn.Linear(FEATURES, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, CLASSES))

    def peak(*callbacks):
        module = seeded(lambda: Classifier(wide()))
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.empty(2**30, dtype=torch.uint8, device="cuda")  # before the fit, and larger than what it needs
        trainer(*callbacks, accelerator="cuda").fit(module, loader(12))
        return torch.cuda.max_memory_allocated()

    ours = InductorCompile(targets=["net"], baseline_steps=3)
    assert peak(ours) >= 2**30
    assert ours.report.train.diagnostics.eager_peak_memory_mib is None
    assert ours.report.train.diagnostics.eager_peak_memory_at_most_mib >= 1024
