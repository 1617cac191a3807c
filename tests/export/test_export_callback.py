"""`AOTInductorExport`: the package at the end of a fit, its weights and report, and a run that is as without it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import AOTInductorExport, CompileWarning, InductorCompile, load_exported
from tests.cases.case import Case, attributes, run
from tests.support.models import FEATURES, Classifier, expected, fit, loader, seeded, trainer

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
X = torch.linspace(-1, 1, 5 * FEATURES).reshape(5, FEATURES)


class Aging(Classifier):
    """Its first epoch is its best, and ``weights_only=True`` refuses the class of its hyperparameter."""

    example_input_array = torch.randn(1, FEATURES)

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"user": SimpleNamespace()})

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("age", float(self.current_epoch))


class NamesItsNet(Classifier):
    def configure_model(self):
        self.made = self.net


@pytest.fixture
def uncompiled(monkeypatch):
    """Write the programs of torch.export, which need no C++ compiler."""

    def compiles(program, *, package_path, inductor_configs):
        torch.export.save(program, package_path, extra_files=inductor_configs["aot_inductor.metadata"])

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiles)


def checkpointing(folder: Path, best: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="age", mode="min", save_top_k=best, save_last=True)


def assert_exports(callback, module):
    torch.testing.assert_close(load_exported(callback.path)(X), expected(module, X), rtol=1e-4, atol=1e-5)


def best_of(checkpoint):
    best = Aging()
    best.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"])
    return best


def test_the_best_weights_are_exported_and_the_run_is_unchanged(tmp_path, uncompiled, no_codegen):
    def run_with(folder, *callbacks):
        torch._dynamo.reset()
        logger, checkpoint = TensorBoardLogger(folder), checkpointing(folder / "checkpoints")
        settings = {"logger": logger, "max_epochs": 2, "enable_checkpointing": True, "log_every_n_steps": 1}
        case = Case(name="export", make=Aging, trainer=settings, others=lambda: [checkpoint], predict=None)
        return run(case, *callbacks), checkpoint, logger.log_dir

    plain, _, _ = run_with(tmp_path / "without", InductorCompile(baseline_steps=0))
    compiler, callback = InductorCompile(baseline_steps=0), AOTInductorExport(tmp_path / "best.pt2")
    ours, checkpoint, logdir = run_with(tmp_path / "with", compiler, callback)
    torch.testing.assert_close(ours.values, plain.values, rtol=0, atol=0)
    assert ours.generators == plain.generators
    assert [attributes(module) for module in ours.module.modules()] == [*map(attributes, plain.module.modules())]
    assert (compiler.report.infer.graphs, compiler.report.infer.recompiles) == (1, 0)
    assert_exports(callback, best_of(checkpoint))
    with pytest.raises(AssertionError, match="not close"):
        assert_exports(callback, ours.module)

    report = callback.report
    assert report.path == str(callback.path)
    assert (report.weights, report.verified, report.error, report.samples) == ("best", "equal", None, 50)
    assert report.checkpoint == checkpoint.best_model_path
    assert report.max_abs_error < 1e-4
    assert report.size_mib == pytest.approx(callback.path.stat().st_size / 2**20)
    assert min(report.export_seconds, report.eager_ms, report.package_ms) > 0
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert "package ms" in str(report)
    assert str(callback.path) in str(report)
    events = EventAccumulator(logdir).Reload()
    logged = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if tag.startswith("export/")}
    assert logged == pytest.approx(report.scalars())
    assert len(logged) == 4
    [text] = events.Tensors("export_report/text_summary")
    assert "package ms" in text.tensor_proto.string_val[0].decode()


@pytest.mark.parametrize(
    ("make", "settings", "name"),
    [
        (Classifier, {"target": "net"}, "input"),
        (NamesItsNet, {"target": "made"}, "input"),
        (Classifier, {"inputs": lambda batch: {"x": batch[0] * 2}}, "x"),
        (Classifier, {"inputs": lambda batch: (batch[0],), "dynamic_batch": False}, "x"),
        (Aging, {"mode": "default"}, "x"),
    ],
)
def test_target_and_inputs_choose_what_is_exported_without_best_weights(tmp_path, make, settings, name, uncompiled):
    callback = AOTInductorExport(tmp_path / "net.pt2", **settings)
    with pytest.warns(CompileWarning, match=r"net\.pt2 gets the last weights: no best checkpoint exists"):
        module = fit(callback, make=make)
    assert (callback.report.verified, callback.report.weights) == ("equal", "last")
    outputs = load_exported(callback.path)(**{name: X[:4]})
    torch.testing.assert_close(outputs, expected(module, X[:4]), rtol=1e-4, atol=1e-5)


class Payload:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


NAMED = "named.ckpt"
AS_BEST = {"best_model_path": NAMED, "best_model_score": torch.tensor(-1e9)}
AMONG_OTHERS = {"best_k_models": {NAMED: torch.tensor(-1e9)}, "kth_best_model_path": NAMED}


@pytest.mark.parametrize(
    ("content", "names", "epochs", "weights"),
    [
        ({"payload": Payload()}, AS_BEST, 2, "last"),
        # This file becomes the best one when the next checkpoint is compared with it.
        ({"payload": Payload()}, AMONG_OTHERS, 2, "last"),
        ({"payload": Payload()}, AS_BEST, 1, "last"),  # no training is left
        ({"hyper_parameters": {"rate": 0.1}}, AS_BEST, 2, "best"),
    ],
)
@pytest.mark.usefixtures("uncompiled")
def test_a_resumed_checkpoint_may_name_the_best(content, names, epochs, weights, tmp_path, monkeypatch, recwarn):
    """The best checkpoint is exported if it has only weights."""
    monkeypatch.chdir(tmp_path)
    torch.save({"state_dict": seeded(Classifier).state_dict(), **content}, NAMED)
    checkpoint = checkpointing(tmp_path)
    fit(checkpoint, make=Aging, enable_checkpointing=True)
    state = torch.load(checkpoint.last_model_path, weights_only=False)
    (of_checkpoint,) = [value for name, value in state["callbacks"].items() if name.startswith("ModelCheckpoint")]
    of_checkpoint |= names
    torch.save({**state, "hyper_parameters": {}}, "resumed.ckpt")
    callback, checkpoint = AOTInductorExport("net.pt2"), checkpointing(tmp_path, best=1 + (names is AMONG_OTHERS))
    settings = {"max_epochs": epochs, "enable_checkpointing": True, "ckpt_path": "resumed.ckpt"}
    module = fit(callback, checkpoint, make=Aging, **settings)
    said = [str(warning.message) for warning in recwarn if warning.category is CompileWarning]
    assert len(module.losses) == (0 if epochs == 1 else 8)
    assert not Path("ran").exists()
    assert (callback.report.weights, callback.report.error) == (weights, None)
    if weights == "last":
        assert re.match(r"net\.pt2 gets the last weights: .*named\.ckpt cannot be loaded so", said[0])
        assert_exports(callback, module)
    else:
        assert (said, callback.report.checkpoint) == ([], NAMED)
        assert_exports(callback, seeded(Classifier))


def test_a_best_checkpoint_of_this_process_is_exported_with_hyperparameters_of_any_class(tmp_path, uncompiled):
    callback, checkpoint = AOTInductorExport(tmp_path / "net.pt2"), checkpointing(tmp_path)
    made, module = trainer(callback, checkpoint, enable_checkpointing=True), seeded(Aging)
    for epochs in (2, 3):  # the best checkpoint is still that of the first fit
        made.fit_loop.max_epochs = epochs
        made.fit(module, loader(), loader(2, seed=2))
        assert (callback.report.weights, callback.report.checkpoint) == ("best", checkpoint.best_model_path)
    assert_exports(callback, best_of(checkpoint))


def test_a_module_that_cannot_be_exported_sharded_weights_and_missing_inputs_are_warnings(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last", inputs=lambda batch: batch[0][:, 1:])
    text = r"net\.pt2 was not written: Classifier cannot be exported: .*\(at \S+models\.py:"
    with pytest.warns(CompileWarning, match=text):
        module = fit(callback)
    assert len(module.losses) == 8
    assert callback.report.describe().startswith("no package: Classifier cannot be exported: ")
    assert list(tmp_path.iterdir()) == []
    sharded = SimpleNamespace(is_global_zero=True, strategy=FSDPStrategy(), loggers=(), global_step=0)
    with pytest.warns(CompileWarning, match="FSDPStrategy shards the weights"):
        callback.on_fit_end(sharded, Classifier())
    with pytest.warns(CompileWarning, match="ran no batch, and example_input_array is not set"):
        fit(callback, limit_train_batches=0, limit_val_batches=0)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_on_a_gpu_exports_a_package_for_a_gpu(tmp_path, precision):
    doctor = [sys.executable, "-m", "compile_callbacks", "doctor", "--json"]
    checks = json.loads(subprocess.run(doctor, capture_output=True, check=False).stdout)["checks"]
    if ("C++ compiler", "ok") not in [(check["name"], check["status"]) for check in checks]:
        pytest.skip("packages for a GPU may crash, as `doctor` says")
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    module = fit(InductorCompile(baseline_steps=0), callback, accelerator="cuda", precision=precision, max_epochs=2)
    report, package = callback.report, load_exported(callback.path)
    assert (report.error, report.verified, package.device) == (None, "equal", "cuda")
    assert min(report.eager_ms, report.package_ms) > 0
    for x in (torch.randn(1, FEATURES, device="cuda"), torch.randn(5, FEATURES, device="cuda")):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16-mixed"):
            torch.testing.assert_close(package(x), expected(module.cuda(), x), rtol=2e-2, atol=2e-2)
