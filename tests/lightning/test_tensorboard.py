"""What TensorBoard gets of a real run: charts, text and a plot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from compile_callbacks import InductorCompile
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

USERS_LAYOUT = {"mine": {"loss": ["Multiline", ["val_loss"]]}}


class WithHparams(Classifier):
    def __init__(self, lr=0.1, shape=None):
        super().__init__()
        self.save_hyperparameters()


def fit(logger, module=None, **kwargs):
    callback = InductorCompile(baseline_steps=5)
    trainer(callback, logger=logger, max_epochs=2, **kwargs).fit(module or Classifier(), loader(12), loader(8))
    return callback


def read(logger):
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def layout(logger):
    """The layout that TensorBoard uses: a run's last."""
    [*_, last] = read(logger).Tensors("custom_scalars__config__")
    found = Layout.FromString(last.tensor_proto.string_val[0])
    return {c.title: {chart.title: list(chart.multiline.tag) for chart in c.chart} for c in found.category}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a module without hyperparameters, and its report."""
    torch._dynamo.reset()
    logger = TensorBoardLogger(tmp_path_factory.mktemp("logs"))
    return logger, fit(logger).report


def test_one_page_has_the_charts_of_each_phase(ran):
    logger, _ = ran
    logged = read(logger).Tags()["scalars"]
    for phase in ("train", "infer"):
        charts = layout(logger)[f"torch.compile, {phase} phase"]
        shown = {
            title: {tag for tag in logged if any(re.match(one, tag) for one in tags)} for title, tags in charts.items()
        }
        assert shown == {
            "step time in ms: eager (flat line), compiled (median so far)": {
                f"step/{phase}/eager_ms",
                f"step/{phase}/compiled_ms",
            },
            "net seconds saved": {f"step/{phase}/net_seconds_saved"},
            "seconds spent compiling": {f"compile/{phase}/seconds"},
            "recompiles": {f"compile/{phase}/recompiles"},
        }


def test_layout_of_the_user_is_kept(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    module = Classifier()

    module.on_fit_start = lambda: logger.experiment.add_custom_scalars(USERS_LAYOUT)
    fit(logger, module)
    assert layout(logger) == {"mine": {"loss": ["val_loss"]}}


def test_text_holds_the_report(ran):
    logger, report = ran
    [text, *_] = read(logger).Tensors("compile_report/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert f"| graphs | {report.train.graphs} | {report.infer.graphs} |" in shown
    assert shown.startswith("## Compile report\n\n**train ")
    assert "| targets | net | forward |" in shown
    assert f"| torch | {torch.__version__.partition('+')[0]}" in shown


def test_hyperparameters_of_the_user_are_left_alone(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    fit(logger, WithHparams(lr=0.2))
    assert yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text()) == {"lr": 0.2, "shape": None}
