"""`compile_callbacks.pytorch_lightning` in the Trainer and the LightningCLI of the package ``pytorch_lightning``."""

from __future__ import annotations

import json
import logging

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.cli import LightningCLI
from pytorch_lightning.loggers import TensorBoardLogger
from pytorch_lightning.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks.pytorch_lightning import InductorCompile
from compile_callbacks.testing import assert_same_training
from tests.support.models import QUIET, loader

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
    pytest.mark.usefixtures("no_codegen"),
]


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("mean", self.net(batch[0]).mean())

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return loader(12)

    val_dataloader = train_dataloader


def test_both_phases_compile_and_lines_and_figures_go_to_the_loggers_of_the_package(tmp_path, caplog):
    callback, logger = InductorCompile("default", "default", baseline_steps=0), TensorBoardLogger(tmp_path)
    module = Module()
    with caplog.at_level(logging.INFO):
        pl.Trainer(callbacks=callback, **QUIET | {"logger": logger}).fit(module)
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (1, 1)
    assert "_compiled_call_impl" not in vars(module.net)
    tags = EventAccumulator(logger.log_dir).Reload().Tags()
    assert "compile/train/graphs" in tags["scalars"]
    assert "compile_report/text_summary" in tags["tensors"]
    (name,) = {record.name for record in caplog.records if record.message.startswith("report: ")}
    assert name == "pytorch_lightning"


def test_a_second_callback_raises_the_exception_of_the_package():
    with pytest.raises(MisconfigurationException, match="CC203"):
        pl.Trainer(callbacks=[InductorCompile(), InductorCompile()], **QUIET).fit(Module())


def test_lightning_cli_builds_the_callback(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["main.py"])
    of_callback = {"class_path": "compile_callbacks.pytorch_lightning.InductorCompile"}
    of_callback["init_args"] = {"train_mode": "eager"}
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"seed_everything": 0, "trainer": {**QUIET, "callbacks": [of_callback]}}))
    made = LightningCLI(Module, args=["--config", str(path)], run=False, save_config_callback=None)
    (callback,) = [callback for callback in made.trainer.callbacks if isinstance(callback, InductorCompile)]
    assert callback.arguments.uncompiled == {"train"}


def test_training_equals_eager():
    callback = InductorCompile(baseline_steps=0)
    assert assert_same_training(Module, lambda: loader(12), steps=4, callback=callback) == "same"
