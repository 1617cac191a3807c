"""What TensorBoard gets of a real run: charts, text, a plot, and modes next to the user's hyperparameters."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from compile_callbacks import InductorCompile
from tests.support.models import Classifier, loader, trainer

pytestmark = pytest.mark.usefixtures("no_codegen")

MODES = {"compile/train_mode": "default", "compile/infer_mode": "default", "compile/targets": "auto"}
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


def hparams(logger):
    """The entry that TensorBoard uses: a run's first."""
    metadata = read(logger).summary_metadata
    parsed = [
        HParamsPluginData.FromString(metadata[f"_hparams_/{part}"].plugin_data.content)
        for part in ("experiment", "session_start_info")
    ]
    values = parsed[1].session_start_info.hparams
    metrics = {info.name.tag for info in parsed[0].experiment.metric_infos}
    assert {info.name for info in parsed[0].experiment.hparam_infos} == set(values)
    return {name: value.string_value or value.number_value for name, value in values.items()}, metrics


def hparams_yaml(logger):
    return yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())


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
            "step time in ms, eager and compiled": {f"step/{phase}/eager_ms", f"step/{phase}/compiled_ms"},
            "net seconds saved": {f"step/{phase}/net_seconds_saved"},
            "seconds spent compiling": {f"compile/{phase}/seconds"},
            "recompiles": {f"compile/{phase}/recompiles"},
        }


def test_layout_is_written_once_and_not_again_by_a_later_run_of_the_same_folder(ran):
    logger, _ = ran
    assert len(read(logger).Tensors("custom_scalars__config__")) == 1
    again = TensorBoardLogger(logger.save_dir, version=logger.version)
    fit(again)
    assert len(read(again).Tensors("custom_scalars__config__")) == 1


@pytest.mark.parametrize("when", ["before", "in training", "after"])
def test_layout_of_the_user_is_kept(tmp_path, when):
    logger = TensorBoardLogger(tmp_path)
    module = Classifier()

    def write():
        logger.experiment.add_custom_scalars(USERS_LAYOUT)

    if when == "before":
        write()
    elif when == "in training":
        module.on_train_epoch_end = write
    fit(logger, module)
    if when == "after":
        write()
        logger.save()
    assert layout(logger) == {"mine": {"loss": ["val_loss"]}}


def test_text_holds_the_report(ran):
    logger, report = ran
    [text, *_] = read(logger).Tensors("compile_report/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert f"| graphs | {report.train.graphs} | {report.infer.graphs} |" in shown
    assert shown.startswith("## Compile report\n\n**train ")
    assert "| targets | net | forward |" in shown
    assert f"| torch | {torch.__version__.partition('+')[0]}" in shown


def test_hparams_of_a_module_without_any_are_the_modes_with_the_step_times(ran):
    logger, _ = ran
    values, metrics = hparams(logger)
    assert values == MODES
    assert {"step/train/eager_ms", "step/train/compiled_ms"} <= metrics
    assert metrics <= set(read(logger).Tags()["scalars"])
    assert hparams_yaml(logger) == {}


def test_hparams_of_the_user_and_modes_are_one_entry(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    fit(logger, WithHparams(lr=0.2, shape={"depth": 3, "width": [1, 2]}))
    values, metrics = hparams(logger)
    assert values == {**MODES, "lr": 0.2, "shape/depth": 3, "shape/width": "[1, 2]"}
    assert metrics == {"hp_metric"}
    assert hparams_yaml(logger) == {**MODES, "lr": 0.2, "shape": {"depth": 3, "width": [1, 2]}}


def test_a_checkpoint_loads_with_the_hparams_file(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    run = trainer(InductorCompile(baseline_steps=0), logger=logger)
    run.fit(WithHparams(lr=0.2), loader(2))
    run.save_checkpoint(tmp_path / "run.ckpt")
    loaded = WithHparams.load_from_checkpoint(
        tmp_path / "run.ckpt", hparams_file=Path(logger.log_dir, "hparams.yaml"), weights_only=False
    )
    assert loaded.hparams.lr == 0.2


@pytest.mark.parametrize("saved", [False, True])
def test_hparams_that_the_user_logs_with_metrics_are_kept(tmp_path, saved):
    class LogsByHand(WithHparams if saved else Classifier):
        def on_train_start(self):
            self.logger.log_hyperparams({"lr": 0.3}, {"accuracy": 0.9})

    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    fit(logger, LogsByHand())
    assert hparams(logger) == ({"lr": 0.3}, {"accuracy"})


def test_nothing_is_written_if_nothing_is_compiled(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    trainer(InductorCompile(None, None), logger=logger).fit(WithHparams(), loader(4))
    assert read(logger).Tags()["tensors"] == []
    assert hparams(logger) == ({"lr": 0.1, "shape": "None"}, {"hp_metric"})
