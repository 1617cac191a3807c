"""Two `InductorCompile` callbacks in one Trainer, for different targets."""

from __future__ import annotations

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from compile_callbacks import InductorCompile, InductorConfig, Tune
from compile_callbacks.report.file import FILE_NAME
from tests.support import models
from tests.support.against_eager import assert_same_module, assert_same_values
from tests.support.models import CLASSES, Classifier, RecordingLogger, loader, mlp, seeded, trainer
from tests.support.step_times import Times

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class TwoParts(Classifier):
    """A body and a head; its ``forward`` calls both."""

    def __init__(self):
        super().__init__(nn.Sequential(mlp(), nn.Linear(CLASSES, CLASSES)))
        self.body, self.head = self.net
        self.net = None

    def forward(self, x):
        return self.head(self.body(x))

    def logits(self, x):
        return self.head(self.body(x))


def pair(**settings):
    return [InductorCompile(targets=[name], **settings) for name in ("body", "head")]


def fit(*callbacks, **settings):
    return models.fit(*callbacks, make=TwoParts, num_sanity_val_steps=0, **settings)


def test_each_compiles_its_targets_and_the_first_reports_the_step_times(tmp_path):
    logger = RecordingLogger()
    body = InductorCompile("default", InductorConfig(dynamic=False), targets=["body"], baseline_steps=4)
    head = InductorCompile("lite", "eager", targets=["head"], baseline_steps=0)
    graphs_of_head = []

    class Counts(pl.Callback):
        def on_train_batch_end(self, *args):
            graphs_of_head.append(head.report.train.graphs)

    ours = fit(body, head, Counts(), train=20, logger=logger, default_root_dir=tmp_path)
    eager = fit(train=20)
    assert_same_values(ours, eager)
    assert_same_module(ours, eager)
    train, infer = (body.report.train, head.report.train), (body.report.infer, head.report.infer)
    assert [(report.mode, report.targets, report.graphs) for report in train] == [
        ("default", ("body",), 1),
        ("lite", ("head",), 1),
    ]
    assert [report.targets for report in infer] == [("body",), ()]
    # The first two of the six eager steps are warm-up steps.
    assert graphs_of_head.index(1) == 6
    assert train[0].samples >= 4
    assert train[1].diagnostics.series == ()
    assert (train[1].eager_step_ms, train[1].compiled_step_ms, train[1].samples) == (None, None, None)

    logged = {name for metrics, _ in logger.calls for name in metrics}
    assert {"compile/train/seconds", "compile/train/head/seconds", "step/train/compiled_ms"} <= logged
    assert {name for name in logged if "head" in name and not name.startswith("compile/train/head/")} == set()
    records = json.loads(Path(tmp_path, FILE_NAME).read_text())
    assert [(record["call"], record["name"]) for record in records] == [("fit", ""), ("fit", "head")]
    assert [record["report"]["train"]["targets"] for record in records] == [["body"], ["head"]]


def test_targets_none_compiles_the_other_parts_of_a_module_that_contains_a_target_of_the_other():
    rest, linear = InductorCompile(baseline_steps=0), InductorCompile(targets=["body.0"], baseline_steps=0)
    ours = fit(rest, linear)
    assert_same_values(ours, fit())
    assert linear.report.train.targets == ("body.0",)
    assert {"head", "body.3"} <= set(rest.report.train.targets)
    assert not {"forward", "body", "body.0"} & set(rest.report.train.targets)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (None, None, r"InductorCompile\('max-autotune', targets=\['net'\]\)"),
        (["body"], ["head", "body"], "overlapping targets: 'body' and 'body'"),
        (["body.*"], ["body"], r"overlapping targets: 'body\.0' and 'body'"),
        (["head"], ["forward"], "overlapping targets: 'head' and 'forward'"),
        (["head"], ["head.forward"], r"overlapping targets: 'head' and 'head\.forward'"),
    ],
)
def test_overlapping_targets_are_refused_at_the_start(one, other, message):
    module = seeded(TwoParts)
    with pytest.raises(MisconfigurationException, match=message):
        trainer(InductorCompile(targets=one), InductorCompile(targets=other)).fit(module, loader(2))
    assert not module._load_state_dict_pre_hooks


def test_a_checkpoint_has_the_state_of_each_and_a_resumed_run_measures_no_baseline(tmp_path):
    fit(*pair(baseline_steps=4), train=20).trainer.save_checkpoint(tmp_path / "run.ckpt")
    states = torch.load(tmp_path / "run.ckpt", weights_only=True)["compile_callbacks"]
    assert {key: state["report"]["train"]["targets"] for key, state in states.items()} == {
        "['body']": ["body"],
        "['head']": ["head"],
    }

    body, head = pair(baseline_steps=4)
    fit(body, head, train=20, max_epochs=2, ckpt_path=tmp_path / "run.ckpt")
    assert body.report.before.train.targets == ("body",)
    assert head.report.before.train.targets == ("head",)
    assert body.report.train.diagnostics.restored
    assert [series["kind"] for series in body.report.train.diagnostics.series] == ["compiling", "compiled"]


def test_the_callback_that_tunes_a_phase_measures_its_steps(monkeypatch):
    Times(monkeypatch, train={"eager": 10, "default": 5})
    body = InductorCompile("default", None, targets=["body"], baseline_steps=4)
    head = InductorCompile(Tune(["default"], steps=5), None, targets=["head"])
    ours, eager = fit(body, head, train=40), fit(train=40)
    assert_same_values(ours, eager, {"rtol": 1e-3, "atol": 1e-4})
    assert (head.report.train.mode, head.report.train.speedup) == ("default", 2.0)
    assert (body.report.train.graphs, body.report.train.samples) == (1, None)
