"""`AOTInductorExport`: what is exported at the end of a fit, what is said of it, and that it costs the run nothing."""

from __future__ import annotations

import functools
import json
import random

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import FSDPStrategy
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from compile_callbacks import AOTInductorExport, CompileWarning, InductorCompile, export, graph_pass, load_exported
from compile_callbacks.exporting.call_spec import ExampleCall
from compile_callbacks.report.export_report import ExportReport
from tests.support.against_eager import assert_same_module
from tests.support.export_runs import expected, fit
from tests.support.models import FEATURES, Classifier, loader, mlp, trainer
from tests.support.processes import run_in_new_process

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Aging(Classifier):
    """Its first epoch is its best."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("age", float(self.current_epoch))


class ByValue(Classifier):
    def forward(self, x):
        return self.net(x) if x.sum() > 0 else -self.net(x)


class WithExample(Classifier):
    example_input_array = torch.randn(1, FEATURES)


@graph_pass
def turns_signs(graph, is_inference):
    """Wrong on purpose."""
    output = next(node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(output):
        [value] = output.args[0]
        output.args = ([graph.call_function(torch.ops.aten.neg.default, (value,))],)


@pytest.fixture
def uncompiled(monkeypatch):
    """Have no C++ compiled: the programs of torch.export are what is loaded and compared."""
    program = functools.partial(export, format="export")
    monkeypatch.setattr("compile_callbacks.callbacks.aot_export.export", program)


# ------------------------------------------------------------------------------------------ with AOTInductor


class Run:
    """A fit with InductorCompile, TensorBoard and checkpoints, and one without the export."""

    def __init__(self, folder) -> None:
        self.export = AOTInductorExport(folder / "best.pt2")
        self.compile = InductorCompile(baseline_steps=0)
        self.module, self.best, self.drawn, self.logdir = self._fit(folder / "with", self.compile, self.export)
        torch._dynamo.reset()
        self.plain, _, self.plain_drawn, _ = self._fit(folder / "without", InductorCompile(baseline_steps=0))

    def _fit(self, folder, *callbacks):
        checkpoint = ModelCheckpoint(folder / "checkpoints", monitor="age", mode="min")
        logger = TensorBoardLogger(folder)
        settings = {"logger": logger, "enable_checkpointing": True, "log_every_n_steps": 1}
        random.seed(0)
        module = fit(*callbacks, checkpoint, make=Aging, **settings)
        best = Aging()
        best.load_state_dict(torch.load(checkpoint.best_model_path, weights_only=False)["state_dict"])
        return module, best, (torch.rand(3), random.random()), logger.log_dir


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("run"))


@pytest.mark.all_versions
def test_the_best_weights_are_exported(run):
    package, x = load_exported(run.export.path), torch.randn(5, FEATURES)
    assert package.format == "aoti"
    torch.testing.assert_close(package(x), expected(run.best, x), **CLOSE)
    assert not torch.allclose(package(x), expected(run.module, x), **CLOSE)


@pytest.mark.all_versions
def test_what_was_measured_is_in_the_report(run):
    report = run.export.report
    assert (report.path, report.weights, report.verified, report.error) == (str(run.export.path), "best", "equal", None)
    assert report.checkpoint.endswith(".ckpt")
    assert report.max_abs_error < 1e-4
    assert report.size_mib == pytest.approx(run.export.path.stat().st_size / 2**20)
    assert report.export_seconds > 0
    assert all(ms > 0 for ms in (report.eager_ms, report.package_ms))
    assert report.samples == 50
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert "package ms" in str(report)
    assert str(run.export.path) in str(report)
    assert report.describe().endswith("medians of 50)")


@pytest.mark.all_versions
def test_what_was_measured_is_in_tensorboard(run):
    events = EventAccumulator(run.logdir).Reload()
    logged = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if tag.startswith("export/")}
    assert logged == pytest.approx(run.export.report.scalars())
    assert len(logged) == 4
    [text] = events.Tensors("export_report/text_summary")
    assert "package ms" in text.tensor_proto.string_val[0].decode()


@pytest.mark.all_versions
def test_the_run_is_as_without_the_export(run):
    torch.testing.assert_close(run.module.state_dict(), run.plain.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(run.drawn, run.plain_drawn, rtol=0, atol=0)
    assert_same_module(run.module, run.plain)
    assert [m.training for m in run.module.modules()] == [m.training for m in run.plain.modules()]
    assert run.compile.report.infer.graphs == 1
    assert run.compile.report.infer.recompiles == 0


def test_a_package_that_differs_from_eager_does_not_replace_an_older_one(tmp_path):
    path = tmp_path / "net.pt2"
    path.write_text("an older package")
    callback = AOTInductorExport(path, weights="last", config={"passes": [turns_signs]})
    with pytest.warns(
        CompileWarning,
        match=r"net\.pt2 was not made: the package differs from eager: output 0 has a relative error of 2 ",
    ):
        fit(callback)
    assert path.read_text() == "an older package"
    assert [file.name for file in tmp_path.iterdir()] == ["net.pt2"]
    assert callback.report.verified == "differs"
    assert callback.report.max_abs_error > 0
    assert callback.report.path is None


# ------------------------------------------------------------------------------------------ weights and inputs


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
def test_the_last_weights_stand_in_for_best_ones_with_a_warning(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2")
    with pytest.warns(CompileWarning, match=r"net\.pt2 gets the last weights: there is no best checkpoint"):
        module = fit(callback)
    assert callback.report.weights == "last"
    x = torch.randn(3, FEATURES)
    torch.testing.assert_close(load_exported(callback.path)(x), expected(module, x), **CLOSE)


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    ("make", "settings", "inputs"),
    [
        (Classifier, {"target": "net"}, "input"),
        (Classifier, {"inputs": lambda batch: {"x": batch[0] * 2}}, "x"),
        (Classifier, {"inputs": lambda batch: (batch[0],), "dynamic_batch": False}, "x"),
        (WithExample, {"config": "default"}, "x"),
    ],
)
@pytest.mark.filterwarnings("ignore:config='default' has no effect")
def test_what_is_exported_can_be_chosen(tmp_path, make, settings, inputs):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last", **settings)
    module = fit(callback, make=make)
    assert callback.report.verified == "equal"
    x = torch.randn(4, FEATURES)
    torch.testing.assert_close(load_exported(callback.path)(**{inputs: x}), expected(module, x), **CLOSE)


class MakesItsNet(Classifier):
    """Its network is made in ``configure_model``."""

    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        self.net = self.net or mlp()


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
def test_a_target_may_be_made_in_configure_model(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last", target="net")
    fit(callback, make=MakesItsNet, max_epochs=1)
    assert callback.report.error is None
    assert callback.path.exists()


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
def test_the_trainers_precision_is_the_packages(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    fit(callback, precision="bf16-mixed")
    assert load_exported(callback.path)(torch.randn(4, FEATURES)).dtype == torch.bfloat16


class DrawsNoise(Classifier):
    def forward(self, x):
        return self.net(x) + torch.rand_like(x[:, :1])


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
def test_what_cannot_be_compared_is_exported_with_a_warning(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    with pytest.warns(CompileWarning, match="is not compared with eager: random numbers"):
        fit(callback, make=DrawsNoise)
    assert callback.report.verified == "not compared"
    assert callback.path.exists()
    unasked = AOTInductorExport(callback.path, weights="last", verify=False)
    fit(unasked, make=DrawsNoise)
    assert unasked.report.verified is None


@pytest.mark.all_versions
def test_a_batch_becomes_inputs():
    class Takes(nn.Module):
        def forward(self, ids, mask=None):
            return ids

    class TakesAll(nn.Module):
        def forward(self, **inputs):
            return inputs

    x, y = torch.ones(1), torch.zeros(1)
    for batch, module, call in [
        (x, Takes(), ((x,), {})),
        ((x, y), Takes(), ((x,), {})),
        ([[x, y], y], Takes(), (([x, y],), {})),
        ([], Takes(), (([],), {})),
        ({"ids": x, "mask": y, "labels": y}, Takes(), ((), {"ids": x, "mask": y})),
        ({"other": x}, Takes(), (({"other": x},), {})),
        ({"ids": x, "labels": y}, TakesAll(), ((), {"ids": x, "labels": y})),
    ]:
        assert ExampleCall.of_batch(batch, module) == call


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.all_versions
def test_a_module_that_cannot_be_exported_costs_a_warning(tmp_path):
    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    with pytest.warns(CompileWarning, match=rf"net\.pt2 was not made: ByValue cannot be exported: .*\(at {__file__}:"):
        module = fit(callback, make=ByValue)
    assert len(module.losses) == 16
    assert "data-dependent" in callback.report.error
    assert callback.report.describe().startswith("no package: ByValue")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all_versions
@pytest.mark.usefixtures("uncompiled")
def test_a_checkpoint_that_is_gone_costs_a_warning(tmp_path):
    class Loses(ModelCheckpoint):
        def on_train_end(self, *args):
            super().on_train_end(*args)
            self.best_model_path = str(tmp_path / "gone.ckpt")

    callback = AOTInductorExport(tmp_path / "net.pt2")
    with pytest.warns(CompileWarning, match=r"net\.pt2 was not made: FileNotFoundError: .*gone\.ckpt"):
        fit(callback, Loses(tmp_path / "checkpoints"), enable_checkpointing=True)


@pytest.mark.all_versions
def test_sharded_weights_and_missing_inputs_cost_a_warning(tmp_path):
    class Sharded:
        is_global_zero, strategy, loggers, global_step = True, FSDPStrategy(), (), 0

    callback = AOTInductorExport(tmp_path / "net.pt2")
    with pytest.warns(CompileWarning, match="FSDPStrategy shards the weights"):
        callback.on_fit_end(Sharded(), Classifier())
    with pytest.warns(CompileWarning, match="no batch was seen, and example_input_array is not set"):
        fit(callback, limit_train_batches=0, limit_val_batches=0)


@pytest.mark.all_versions
def test_a_path_that_cannot_be_written_is_told_before_training(tmp_path):
    (tmp_path / "file").touch()
    module = Classifier()
    with pytest.raises(OSError, match="path cannot be written"):
        trainer(AOTInductorExport(tmp_path / "file" / "net.pt2")).fit(module, loader())
    with pytest.raises(ValueError, match="target='nett' is no submodule"):
        trainer(AOTInductorExport(tmp_path / "net.pt2", target="nett")).fit(module, loader())
    assert module.losses == []


PACKAGE_OF_A_FIT = """
import faulthandler, sys

faulthandler.enable()
import torch
from tests.support.models import FEATURES
from tests.support.export_runs import expected, fit

from compile_callbacks import AOTInductorExport, InductorCompile, load_exported

path, accelerator, precision = sys.argv[1:]
callback = AOTInductorExport(path, weights="last")
module = fit(InductorCompile(baseline_steps=0), callback, accelerator=accelerator, precision=precision)
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


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("accelerator", "precision"),
    [
        ("cuda", "32-true"),
        ("cuda", "bf16-mixed"),
    ],
)
def test_a_fit_leaves_a_package_of_its_device_and_precision(tmp_path, accelerator, precision):
    """In a process of its own: code that reads where nothing is ends the process that runs it."""
    run_in_new_process(PACKAGE_OF_A_FIT, tmp_path / "net.pt2", accelerator, precision)


@pytest.mark.all_versions
def test_ranks_above_zero_do_nothing(tmp_path):
    class Other:
        is_global_zero = False

    callback = AOTInductorExport(tmp_path / "net.pt2", weights="last")
    for hook in ("on_train_end", "on_fit_end"):
        getattr(callback, hook)(Other(), Classifier())
    assert callback.report == ExportReport()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"path": "net.onnx"}, ValueError, r"must end in '\.pt2'"),
        ({"weights": "first"}, ValueError, "weights='first' is unknown"),
        ({"target": 3}, TypeError, "target=3 must be the dotted name"),
        ({"inputs": "x"}, TypeError, "inputs='x' must be a function of a batch"),
        ({"config": "eager"}, ValueError, "config='eager' compiles nothing"),
        ({"verify": "warn"}, TypeError, "verify='warn' must be True or False"),
    ],
)
def test_wrong_arguments_are_named(change, error, said):
    with pytest.raises(error, match=said):
        AOTInductorExport(**{"path": "net.pt2", **change})
