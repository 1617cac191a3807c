"""`AOTInductorExport`: the package at the end of a fit, its weights and report, and a run that is as without it."""

from __future__ import annotations

import functools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from compile_callbacks import AOTInductorExport, CompileWarning, ExportError, InductorCompile, export, load_exported
from compile_callbacks.cli.doctor import check_cpp_compiler
from tests.support import models
from tests.support.against_eager import assert_same_module
from tests.support.models import FEATURES, Classifier, expected, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process
from tests.support.wrong_passes import WrongForward

pytestmark = [
    pytest.mark.all_versions,
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
X = torch.linspace(-1, 1, 5 * FEATURES).reshape(5, FEATURES)


def fit(*callbacks, **settings):
    return models.fit(*callbacks, **{"max_epochs": 2, **settings})


def checkpointing(folder: Path, best: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(folder, monitor="age", mode="min", save_top_k=best, save_last=True)


class Hyperparameter:
    """Its class is one that ``weights_only=True`` refuses."""


class WithExample(Classifier):
    example_input_array = torch.randn(1, FEATURES)


class Aging(WithExample):
    """Its first epoch is its best."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"user": Hyperparameter()})

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("age", float(self.current_epoch))


class ByValue(Classifier):
    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


class MakesItsNet(Classifier):
    """Creates its network in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        self.net = self.net or mlp()


@pytest.fixture
def uncompiled(monkeypatch):
    """Export the programs of torch.export, which need no C++ compiler."""
    program = functools.partial(export, format="export")
    monkeypatch.setattr("compile_callbacks.callbacks.aot_export.export", program)


def assert_exports(callback, module):
    torch.testing.assert_close(load_exported(callback.path)(X), expected(module, X), **CLOSE)


def best_of(checkpoint):
    best = Aging()
    best.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"])
    return best


def run_with(folder, *callbacks):
    """A fit with TensorBoard and checkpoints: the module, its best weights, random numbers and the log directory."""
    checkpoint, logger = checkpointing(folder / "checkpoints"), TensorBoardLogger(folder)
    settings = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
    random.seed(0)
    torch._dynamo.reset()
    module = fit(*callbacks, checkpoint, make=Aging, **settings)
    return module, best_of(checkpoint), (torch.rand(3), random.random()), logger.log_dir


def test_the_best_weights_are_exported_and_the_run_is_unchanged(tmp_path):
    callback, compiler = AOTInductorExport(tmp_path / "best.pt2"), InductorCompile(baseline_steps=0)
    module, best, drawn, logdir = run_with(tmp_path / "with", compiler, callback)
    package, report = load_exported(callback.path), callback.report
    assert package.format == "aoti"
    torch.testing.assert_close(package(X), expected(best, X), **CLOSE)
    assert not torch.allclose(package(X), expected(module, X), **CLOSE)

    assert (report.path, report.weights, report.verified, report.error) == (str(callback.path), "best", "equal", None)
    assert report.checkpoint.endswith(".ckpt")
    assert report.max_abs_error < 1e-4
    assert report.size_mib == pytest.approx(callback.path.stat().st_size / 2**20)
    assert min(report.export_seconds, report.eager_ms, report.package_ms) > 0
    assert report.samples == 50
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert "package ms" in str(report)
    assert str(callback.path) in str(report)

    events = EventAccumulator(logdir).Reload()
    logged = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if tag.startswith("export/")}
    assert logged == pytest.approx(report.scalars())
    assert len(logged) == 4
    [text] = events.Tensors("export_report/text_summary")
    assert "package ms" in text.tensor_proto.string_val[0].decode()

    plain, _, plain_drawn, _ = run_with(tmp_path / "without", InductorCompile(baseline_steps=0))
    torch.testing.assert_close(module.state_dict(), plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(drawn, plain_drawn, rtol=0, atol=0)
    assert_same_module(module, plain)
    assert [m.training for m in module.modules()] == [m.training for m in plain.modules()]
    assert (compiler.report.infer.graphs, compiler.report.infer.recompiles) == (1, 0)


@pytest.mark.parametrize("verify", ["warn", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_package_that_differs_from_eager_does_not_replace_an_older_one(tmp_path, verify):
    path = tmp_path / "net.pt2"
    path.write_text("an older package")
    callback = AOTInductorExport(path, weights="last", mode={"passes": [WrongForward("infer")]}, verify=verify)
    text = "the package differs from eager: output 0 has a relative error of "
    warns = pytest.warns(CompileWarning, match=rf"net\.pt2 was not written: {text}")
    with warns if verify == "warn" else pytest.raises(ExportError, match=text):
        fit(callback)
    assert path.read_text() == "an older package"
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]
    assert (callback.report.verified, callback.report.path) == ("differs", None)
    assert callback.report.max_abs_error > 0


# ------------------------------------------------------------------------------------------ weights and inputs


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("make", "settings", "name"),
    [
        (Classifier, {}, "x"),
        (Classifier, {"target": "net"}, "input"),
        (MakesItsNet, {"target": "net"}, "input"),
        (Classifier, {"inputs": lambda batch: {"x": batch[0] * 2}}, "x"),
        (Classifier, {"inputs": lambda batch: (batch[0],), "dynamic_batch": False}, "x"),
        (WithExample, {"mode": "default"}, "x"),
    ],
)
def test_target_and_inputs_choose_what_is_exported_with_a_warning_if_there_are_no_best_weights(
    tmp_path, make, settings, name
):
    callback = AOTInductorExport(tmp_path / "net.pt2", **settings)
    with pytest.warns(CompileWarning, match=r"net\.pt2 gets the last weights: there is no best checkpoint"):
        module = fit(callback, make=make)
    assert (callback.report.verified, callback.report.weights) == ("equal", "last")
    x = torch.randn(4, FEATURES)
    torch.testing.assert_close(load_exported(callback.path)(**{name: x}), expected(module, x), **CLOSE)


# ------------------------------------------------------------------------------------------ best checkpoints


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


def resume(
    folder: Path, *, among_others: bool = False, max_epochs: int = 2, **content
) -> tuple[AOTInductorExport, Aging]:
    """Train one epoch, let its checkpoint name another file with ``content`` as the best one, and resume from it.

    A file that is named among others becomes the best one when the next checkpoint is compared with it.
    """
    named, score, checkpoint = str(folder / "named.ckpt"), torch.tensor(-1e9), checkpointing(folder)
    torch.save({"state_dict": seeded(Classifier).state_dict(), **content}, named)
    fit(checkpoint, make=Aging, max_epochs=1, enable_checkpointing=True)
    state = torch.load(checkpoint.last_model_path, weights_only=False)
    (of_checkpoint,) = [value for name, value in state["callbacks"].items() if name.startswith("ModelCheckpoint")]
    if among_others:
        of_checkpoint |= {"best_k_models": {named: score}, "kth_best_model_path": named}
    else:
        of_checkpoint |= {"best_model_path": named, "best_model_score": score}
    torch.save({**state, "hyper_parameters": {}}, folder / "resumed.ckpt")
    callback, checkpoint = AOTInductorExport(folder / "net.pt2"), checkpointing(folder, best=2 if among_others else 1)
    settings = {"max_epochs": max_epochs, "enable_checkpointing": True, "ckpt_path": folder / "resumed.ckpt"}
    return callback, fit(callback, checkpoint, make=Aging, **settings)


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("settings", [{}, {"among_others": True}, {"max_epochs": 1}])  # 1: no training is left
def test_a_planted_best_checkpoint_is_not_unpickled(settings, tmp_path):
    ran = tmp_path / "ran"
    with pytest.warns(CompileWarning, match=r"net\.pt2 gets the last weights: .*named\.ckpt, which the resumed"):
        callback, module = resume(tmp_path, payload=Payload(ran), **settings)
    assert len(module.losses) == (0 if "max_epochs" in settings else 8)
    assert not ran.exists()
    assert (callback.report.weights, callback.report.error) == ("last", None)
    assert_exports(callback, module)


@pytest.mark.usefixtures("uncompiled")
def test_the_best_checkpoint_of_a_resumed_run_is_exported_if_it_has_only_weights(tmp_path):
    callback, _ = resume(tmp_path, hyper_parameters={"rate": 0.1})
    assert (callback.report.weights, callback.report.checkpoint) == ("best", str(tmp_path / "named.ckpt"))
    assert_exports(callback, seeded(Classifier))


@pytest.mark.usefixtures("uncompiled")
def test_a_best_checkpoint_of_this_process_is_exported_with_hyperparameters_of_any_class(tmp_path):
    callback, checkpoint = AOTInductorExport(tmp_path / "net.pt2"), checkpointing(tmp_path)
    made, module = trainer(callback, checkpoint, enable_checkpointing=True), seeded(Aging)
    for epochs in (2, 3):  # the best checkpoint is still that of the first fit
        made.fit_loop.max_epochs = epochs
        made.fit(module, loader(), loader(2, seed=2))
        assert (callback.report.weights, callback.report.checkpoint) == ("best", checkpoint.best_model_path)
    assert_exports(callback, best_of(checkpoint))


def test_a_module_that_cannot_be_exported_sharded_weights_and_missing_inputs_are_warnings(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    text = rf"net\.pt2 was not written: ByValue cannot be exported: .*\(at {__file__}:"
    with pytest.warns(CompileWarning, match=text):
        module = fit(callback, make=ByValue)
    assert len(module.losses) == 16
    assert "data-dependent" in callback.report.error
    assert callback.report.describe().startswith("no package: ByValue")
    assert list(tmp_path.iterdir()) == []

    class Sharded:
        is_global_zero, strategy, loggers, global_step = True, FSDPStrategy(), (), 0

    with pytest.warns(CompileWarning, match="FSDPStrategy shards the weights"):
        callback.on_fit_end(Sharded(), Classifier())
    with pytest.warns(CompileWarning, match="ran no batch, and example_input_array is not set"):
        fit(callback, limit_train_batches=0, limit_val_batches=0)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"path": "net.onnx"}, ValueError, r"must end in '\.pt2'"),
        ({"weights": "first"}, ValueError, "weights='first' is unknown"),
        ({"target": 3}, TypeError, "target=3 must be the dotted name"),
        ({"target": ""}, ValueError, r"target='' names no submodule.*\[CC201"),
        ({"inputs": "x"}, TypeError, "inputs='x' must be a function of a batch"),
        ({"mode": "eager"}, ValueError, "mode='eager' compiles nothing"),
        ({"verify": "eager"}, ValueError, "verify='eager' is unknown"),
        ({"target": "nowhere"}, ValueError, r"target='nowhere' is not a submodule: .*\[CC201"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change, error, text, tmp_path):
    with pytest.raises(error, match=text):
        fit(AOTInductorExport(**{"path": tmp_path / "net.pt2", **change}))


FIT_WITH_EXPORT = """
import faulthandler, sys

faulthandler.enable()
import torch
from tests.support.models import FEATURES, expected, fit

from compile_callbacks import AOTInductorExport, InductorCompile, load_exported

path, accelerator, precision = sys.argv[1:]
callback = AOTInductorExport(path, weights="last")
module = fit(InductorCompile(baseline_steps=0), callback, accelerator=accelerator, precision=precision, max_epochs=2)
report = callback.report
assert (report.error, report.verified) == (None, "equal"), report
assert min(report.eager_ms, report.package_ms) > 0
package = load_exported(path)
assert package.device == accelerator
module.to(accelerator)
for batch in (1, 5):
    x = torch.randn(batch, FEATURES, device=accelerator)
    with torch.autocast(accelerator, torch.bfloat16, enabled=precision == "bf16-mixed"):
        ours = expected(module, x)
    assert (package(x).dtype, package(x).device) == (ours.dtype, ours.device)
    torch.testing.assert_close(package(x), ours, rtol=2e-2, atol=2e-2)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_fit_on_a_gpu_exports_a_package_for_a_gpu(tmp_path, precision):
    """In another process, which an invalid memory access would end."""
    if (compiler := check_cpp_compiler()).status != "ok":
        pytest.skip(compiler.result)  # packages for a GPU may crash, as `doctor` says
    run_in_new_process(FIT_WITH_EXPORT, tmp_path / "net.pt2", "cuda", precision)
