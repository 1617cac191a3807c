"""What TensorBoard gets of a real run: charts, text, data, and one HPARAMS entry beside the user's."""

from __future__ import annotations

import copy
import json
import pickle
import re

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from models import Classifier, loader, trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from compile_callbacks import InductorCompile
from compile_callbacks.reporting.tensorboard import DATA_TAG

pytestmark = pytest.mark.newest

ENTRY = {"compile/train_mode": "default", "compile/infer_mode": "default", "compile/targets": "forward, net"}
FIGURES = {f"step/{p}/{n}" for p in ("train", "infer") for n in ("speedup", "eager_ms", "compiled_ms")} | {
    "compile/train/seconds",
    "compile/infer/seconds",
}
USERS_LAYOUT = {"mine": {"loss": ["Multiline", ["val_loss"]]}}


class WithHparams(Classifier):
    def __init__(self, lr=0.1, shape=None):
        super().__init__()
        self.save_hyperparameters()


def fit(logger, module=None, **kwargs):
    callback = InductorCompile(baseline_steps=2)
    lightning = trainer(callback, logger=logger, max_epochs=2, **kwargs)
    lightning.fit(module or Classifier(), loader(12), loader(8))
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
    columns = {info.name for info in parsed[0].experiment.hparam_infos}
    metrics = {info.name.tag for info in parsed[0].experiment.metric_infos}
    assert columns == set(values)
    return {name: value.string_value or value.number_value for name, value in values.items()}, metrics


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a module without hyperparameters, and its report."""
    torch._dynamo.reset()
    logger = TensorBoardLogger(tmp_path_factory.mktemp("logs"))
    return logger, fit(logger).report


def test_eager_and_compiled_step_times_share_a_chart_for_each_phase(ran):
    logger, _ = ran
    logged = read(logger).Tags()["scalars"]
    for phase in ("train", "infer"):
        charts = [
            {name for name in logged if any(re.match(t, name) for t in tags)} for tags in charts_of(logger, phase)
        ]
        assert {f"step/{phase}/eager_ms", f"step/{phase}/compiled_ms"} in charts
        assert {f"step/{phase}/speedup"} in charts
        assert {f"compile/{phase}/seconds"} in charts


def charts_of(logger, phase):
    return layout(logger)[f"compile: {phase}"].values()


def test_layout_is_written_once(ran):
    assert len(read(ran[0]).Tensors("custom_scalars__config__")) == 1


@pytest.mark.parametrize("when", ["before", "in training", "after"])
def test_layout_of_the_user_is_kept(tmp_path, when):
    logger = TensorBoardLogger(tmp_path)
    module = Classifier()

    def write():
        logger.experiment.add_custom_scalars(USERS_LAYOUT)

    if when == "before":
        write()
    elif when == "in training":
        module.on_train_epoch_end = write  # after our first, before the summary
    fit(logger, module)
    if when == "after":
        write()
        logger.save()
    ours = {"compile: train", "compile: infer"} if when != "after" else set()
    assert layout(logger).keys() == {"mine"} | ours
    assert layout(logger)["mine"] == {"loss": ["val_loss"]}


def test_text_and_data_hold_the_report(ran):
    logger, report = ran
    events = read(logger)
    [text] = events.Tensors("compile_report/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert f"| speedup | {report.train.speedup:.2f}x |" in shown
    assert "| targets | forward, net | forward, net |" in shown
    assert f"| torch | {torch.__version__.partition('+')[0]}" in shown
    [data] = events.Tensors(DATA_TAG)
    assert json.loads(data.tensor_proto.string_val[0])["report"] == json.loads(json.dumps(report.to_dict()))


def test_hparams_of_a_run_without_the_users(ran):
    logger, _ = ran
    assert hparams(logger) == (ENTRY, FIGURES)
    assert set(read(logger).Tags()["scalars"]) >= FIGURES  # what the entry points at is there
    assert not logger.hparams
    assert "log_hyperparams" not in vars(logger)


def test_hparams_stand_beside_the_users(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    fit(logger, WithHparams(lr=0.2, shape={"depth": 3, "width": [1, 2]}))
    users = {"lr": 0.2, "shape/depth": 3, "shape/width": "[1, 2]"}
    assert hparams(logger) == (ENTRY | users, FIGURES | {"hp_metric"})
    # Nothing of ours where Lightning keeps the user's: hparams.yaml is read back into the module.
    assert logger.hparams == {"lr": 0.2, "shape": {"depth": 3, "width": [1, 2]}}
    assert "log_hyperparams" not in vars(logger)


def test_hparams_that_the_user_writes_after_the_run_take_ours_along(tmp_path):
    logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
    fit(logger, WithHparams(lr=0.2))
    assert not any("hparams" in tag for tag in read(logger).summary_metadata)
    logger.log_hyperparams({"lr": 0.2}, {"accuracy": 0.9})
    logger.save()
    assert hparams(logger) == (ENTRY | {"lr": 0.2}, FIGURES | {"accuracy"})
    assert read(logger).Scalars("accuracy")[-1].value == pytest.approx(0.9)
    assert "log_hyperparams" not in vars(logger)


def test_hparams_and_charts_follow_a_loggers_prefix(tmp_path):
    logger = TensorBoardLogger(tmp_path, prefix="fold1")
    fit(logger)
    logged = set(read(logger).Tags()["scalars"])
    _, metrics = hparams(logger)
    assert metrics == {f"fold1-{name}" for name in FIGURES}
    assert metrics <= logged
    assert any(re.match(tag, "fold1-step/train/eager_ms") for tags in charts_of(logger, "train") for tag in tags)


def test_a_second_run_of_the_same_logger_keeps_the_first_entry(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = InductorCompile(baseline_steps=2)
    lightning = trainer(callback, logger=logger)
    module = WithHparams()
    lightning.fit(module, loader(12), loader(8))
    lightning.test(module, loader(4), verbose=False)
    assert hparams(logger) == (ENTRY | {"lr": 0.1, "shape": "None"}, FIGURES | {"hp_metric"})
    assert "log_hyperparams" not in vars(logger)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda logger: pickle.loads(pickle.dumps(logger))])
def test_a_copy_of_a_logger_made_meanwhile_has_its_own_method(tmp_path, duplicate):
    copies = []

    class Copied(Classifier):
        def on_fit_start(self):
            copies.append(duplicate(self.trainer.logger))

    fit(TensorBoardLogger(tmp_path), Copied())
    assert copies[0].log_hyperparams.__self__ is copies[0]


def test_nothing_is_written_where_nothing_is_compiled(tmp_path):
    logger = TensorBoardLogger(tmp_path)
    callback = InductorCompile(None, None)
    trainer(callback, logger=logger).fit(WithHparams(), loader(4))
    events = read(logger)
    assert events.Tags()["tensors"] == []
    assert hparams(logger) == ({"lr": 0.1, "shape": "None"}, {"hp_metric"})
