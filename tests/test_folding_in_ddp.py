"""Weight folding in two processes under DDP."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import pytest
import torch
from models import Classifier, loader, seeded, trainer

from compile_callbacks import InductorCompile

pytestmark = pytest.mark.newest

EPOCHS = 2


class Compared(Classifier):
    """Keeps how far each validation output lies from what eager code gives for the weights as they are."""

    def __init__(self):
        super().__init__()
        self.differences: list[float] = []

    def validation_step(self, batch, batch_idx):
        self.differences.append(float((self.net(batch[0]) - self.net._call_impl(batch[0])).abs().max()))


class Kept(pl.Callback):
    """Leaves what rank zero saw in a file: the module of a spawned process does not come back."""

    def __init__(self, path, compiler):
        self.path, self.compiler = path, compiler

    def on_fit_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            infer = self.compiler.report.infer
            counts = [infer.graphs, infer.recompiles, infer.fallbacks, infer.weight_refreshes]
            self.path.write_text(json.dumps([counts, pl_module.differences]))


def test_validation_in_a_fit_under_ddp_follows_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "29511")  # else Lightning leaves one behind
    module = seeded(Compared)
    before = module.net[0].weight.detach().clone()
    compiler = InductorCompile(None, "default", targets=["net"], baseline_steps=0, verify="off")
    settings = {"strategy": "ddp_spawn", "devices": 2, "max_epochs": EPOCHS, "num_sanity_val_steps": 0}
    trainer(compiler, Kept(tmp_path / "seen.json", compiler), **settings).fit(module, loader(), loader(4, seed=2))
    counts, differences = json.loads((tmp_path / "seen.json").read_text())
    assert counts == [1, 0, 0, EPOCHS]
    assert len(differences) == 2 * EPOCHS
    assert max(differences) < 1e-5
    assert not torch.equal(before, module.net[0].weight)
