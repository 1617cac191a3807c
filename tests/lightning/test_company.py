"""`InductorCompile` next to other callbacks and settings: each run equals its eager twin."""

from __future__ import annotations

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, OnExceptionCheckpoint
from torch import nn

from compile_callbacks import InductorCompile
from tests.support.against_eager import assert_run_equals_eager, assert_same_module, assert_same_values
from tests.support.models import CLASSES, Classifier, fit, loader, seeded, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")


@pytest.mark.skipif(
    not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has no EMAWeightAveraging"
)
def test_an_average_of_weights_equals_eager():
    def run(*ours):
        averages = lightning_callbacks.EMAWeightAveraging(decay=0.7)
        return fit(averages, *ours, val_check_interval=4, max_epochs=3)

    assert_run_equals_eager(run)


class Transfer(Classifier):
    """A backbone that is frozen at first, and a head."""

    def __init__(self):
        super().__init__(nn.Identity())
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))

    def logits(self, x):
        return self.head(self.backbone(x))

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.1)


def test_a_backbone_that_thaws_equals_eager():
    def run(*ours):
        thaw = BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.05, train_bn=False, should_align=False)
        module = fit(*ours, thaw, make=Transfer, max_epochs=2)
        assert not torch.equal(module.backbone[0].weight, seeded(Transfer).backbone[0].weight)
        return module

    assert_run_equals_eager(run, baseline_steps=2)


class FailsInTheSixthStep(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise OSError("disk full")
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings(
    "ignore:.*was called without a model",
    "ignore:.*there is no last checkpoint available",
    "ignore:You're resuming from a checkpoint that ended before the epoch ended",
)
def test_a_checkpoint_on_exception_equals_eager_and_resumes(tmp_path):
    def fail(folder, *ours):
        module = seeded(FailsInTheSixthStep)
        with pytest.raises(OSError, match="disk full"):
            trainer(*ours, OnExceptionCheckpoint(folder), enable_checkpointing=True).fit(module, loader(), loader(2))
        return module, torch.load(folder / "on_exception.ckpt", weights_only=False)

    ours = InductorCompile(baseline_steps=0)
    (eager, expected), (compiled, saved) = fail(tmp_path / "eager"), fail(tmp_path / "ours", ours)
    assert ours.report.train.graphs >= 1
    assert_same_module(compiled, eager)
    assert_same_values(compiled, eager)
    assert saved["global_step"] == expected["global_step"] == 5
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(saved[part], expected[part], rtol=1e-4, atol=1e-5)
    assert_run_equals_eager(lambda *ours: fit(*ours, max_epochs=2, ckpt_path=tmp_path / "ours" / "on_exception.ckpt"))
