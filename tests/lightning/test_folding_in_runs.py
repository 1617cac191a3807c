"""Weight folding under a Trainer: validation follows the weights without a recompile."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.testing._internal.two_tensor import TwoTensor

from compile_callbacks import CompileWarning, InductorCompile, InductorConfig, graph_pass
from compile_callbacks.folding.folded_graph import Folding
from compile_callbacks.profiling.compile_events import CompileRecorder
from compile_callbacks.runtime.compiled_target import CompiledTarget
from compile_callbacks.runtime.target import Target
from tests.support.against_eager import assert_same_values
from tests.support.convolutional import Convolutional, images
from tests.support.models import CLASSES, FEATURES, Classifier, loader, mlp, seeded, trainer
from tests.support.processes import run_in_new_process

pytestmark = pytest.mark.all_versions

EPOCHS = 5


def fit(*callbacks, make=Classifier, epochs=EPOCHS, **settings):
    module = seeded(make)
    trainer(*callbacks, max_epochs=epochs, **settings).fit(module, loader(), loader(2, seed=2))
    return module


def ours(train_mode="default", infer_mode="default", **kwargs):
    # Verification restores what an eager call changes, buffers among it: a change like any other to folded weights.
    return InductorCompile(train_mode, infer_mode, **{"baseline_steps": 0, "verify": "off", **kwargs})


def assert_refreshed_once_a_stage(callback):
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.fallbacks) == (1, 0, 0)
    assert infer.diagnostics.weight_refreshes == EPOCHS  # each validation; the sanity check is eager


# ------------------------------------------------------------------------------------------ validation in fit


class EditsBeforeValidation(pl.Callback):
    """Validates with other weights, which user code sets through ``.data``: torch keeps no record of it."""

    def __init__(self, edit=lambda parameter: parameter.data.mul_(1.5)):
        self.edit = edit

    def on_validation_start(self, trainer, pl_module):
        self.before = {name: p.data.clone() for name, p in pl_module.named_parameters()}
        for parameter in pl_module.parameters():
            self.edit(parameter)

    def on_validation_end(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.before[name])


def swap(parameter):
    parameter.data = parameter.data * 1.5


def averaging():
    if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning has no EMAWeightAveraging")
    return lightning_callbacks.EMAWeightAveraging(decay=0.7)


@pytest.mark.parametrize("company", [EditsBeforeValidation, lambda: EditsBeforeValidation(swap), averaging])
@pytest.mark.parametrize("ours_first", [True, False])
def test_validation_follows_weights_that_other_callbacks_change(company, ours_first):
    callback, theirs = ours(), company()
    assert_same_values(fit(*((callback, theirs) if ours_first else (theirs, callback))), fit(company()))
    assert_refreshed_once_a_stage(callback)


class ValidatesAsItTrains(Classifier):
    """Calls the module without gradients after each optimizer step, as GANs and self-distillation do."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.eval()
        with torch.no_grad():
            self.validation_outputs.append(self.net(batch[0]))
        self.train()


def test_fused_optimizer_steps_are_seen_within_a_stage():
    callback = ours(InductorConfig(fold_weights=True))
    hooks = set(_global_optimizer_post_hooks)
    assert_same_values(fit(callback, make=ValidatesAsItTrains, epochs=2), fit(make=ValidatesAsItTrains, epochs=2))
    assert callback.report.train.diagnostics.weight_refreshes == 2 * 8
    assert set(_global_optimizer_post_hooks) <= hooks


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["default", "reduce-overhead"])
@pytest.mark.parametrize("company", [EditsBeforeValidation, averaging])
def test_validation_on_a_gpu_follows_the_weights(company, name, precision):
    settings = {"accelerator": "cuda", "precision": precision}
    full = precision == "32-true"
    callback = ours(name if full else None, name)  # steps that round differently to bfloat16 drift apart
    close = {"rtol": 1e-3, "atol": 1e-3} if full else {"rtol": 2e-2, "atol": 2e-2}
    assert_same_values(fit(callback, company(), **settings), fit(company(), **settings), close)
    assert_refreshed_once_a_stage(callback)
    assert callback.report.infer.diagnostics.folded_mib > 0


def test_a_module_that_stays_compiled_follows_its_weights():
    module = fit(ours(targets=["net"], keep_compiled=True), epochs=1).eval()
    x = torch.randn(4, FEATURES)

    def assert_equal():
        with torch.no_grad():
            torch.testing.assert_close(module(x), module.net._call_impl(x), rtol=1e-4, atol=1e-5)

    assert_equal()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=True)
    module(x).square().mean().backward()
    optimizer.step()
    assert_equal()
    module.train()(x)  # the compiled graph changes running statistics
    module.eval()
    assert_equal()
    module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    assert_equal()
    torch._dynamo.reset()


def test_targets_that_share_weights():
    class Sharing(Classifier):
        def __init__(self):
            super().__init__(mlp())
            self.twin = mlp()
            self.twin[0].weight, self.twin[1] = self.net[0].weight, self.net[1]

        def validation_step(self, batch, batch_idx):
            self.validation_outputs.append(self.net(batch[0]) + self.twin(batch[0]))

    callback = ours()
    assert_same_values(fit(callback, make=Sharing, epochs=2), fit(make=Sharing, epochs=2))
    assert callback.report.infer.diagnostics.folded_mib > 0


# ------------------------------------------------------------------------------------------ report and settings


def test_the_report_shows_folded_weights_and_a_pass_sees_the_users_graph_once():
    seen = []

    @graph_pass
    def watch(graph, is_inference):
        seen.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    watch.uuid = lambda: None  # a graph from torch's cache runs no pass
    callback = ours(passes=[watch])
    trainer(callback).predict(Convolutional(), images())
    infer = callback.report.infer.diagnostics
    weights = (8 * 3 * 9 + 8) * 4 / 2**20  # of the convolution, and the sum after it; float32
    assert infer.folded_mib == pytest.approx(weights)
    assert infer.weight_refreshes == 1
    assert callback.report.train.diagnostics.folded_mib is None
    assert "folded weights MiB" in str(callback.report)
    assert json.loads(json.dumps(callback.report.to_dict()))["infer"]["diagnostics"]["weight_refreshes"] == 1
    (targets,) = seen
    assert any("convolution" in target for target in targets)
    assert not any("copy_" in target for target in targets)


class WithTeacher(Classifier):
    """Calls a frozen module in training."""

    def __init__(self):
        super().__init__()
        self.teacher = mlp().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.teacher.eval()
        with torch.no_grad():
            expected = self.teacher(batch[0])
        loss = nn.functional.mse_loss(self.net(batch[0]), expected)
        self.losses.append(loss.item())
        return loss


def test_fold_weights_switches_folding_on_and_off():
    callback = ours(InductorConfig(fold_weights=True), InductorConfig(fold_weights=False))
    assert_same_values(fit(callback, make=WithTeacher, epochs=2), fit(make=WithTeacher, epochs=2))
    train, infer = callback.report.train.diagnostics, callback.report.infer.diagnostics
    assert train.folded_mib > 0
    assert train.weight_refreshes == 2  # the training stage begins again with each epoch's first batch
    assert (infer.folded_mib, infer.weight_refreshes) == (None, None)


def test_a_setting_without_effect_warns():
    with pytest.warns(CompileWarning, match="fold_weights=True has no effect in the train phase"):
        fit(ours(InductorConfig(fold_weights=True)), epochs=1)


def test_weights_that_are_tensor_subclasses_are_not_folded():
    weight = torch.randn(CLASSES, FEATURES)
    module = nn.Linear(FEATURES, CLASSES, bias=False).requires_grad_(False)
    module.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    recorder = CompileRecorder()
    target = Target("net", module)
    compiled_target = CompiledTarget(target, "infer", InductorConfig(), recorder=recorder)
    x = torch.randn(4, FEATURES, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled_target.call(target, x).a, nn.functional.linear(x, weight))
    (event,) = recorder.events_of("infer", "fold")
    assert event.folded_mib is None
    assert "tensor subclasses" in event.reason


# ------------------------------------------------------------------------------------------ torch's cache


@pytest.mark.gpu
def test_torchs_cache_takes_folded_graphs_whose_constant_subgraph_came_from_it():
    saved = counters["aot_autograd"]["autograd_cache_saved"]
    with fresh_cache():
        for batch_size in (4, 8):  # both have the same constant subgraph: the second one comes from Inductor's cache
            torch._dynamo.reset()
            trainer(ours(targets=["net"]), accelerator="cuda").predict(seeded(Classifier).eval(), loader(2, batch_size))
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved + 2


START = """
import json
import torch
from tests.support.convolutional import Convolutional, images, eager
from tests.support.models import trainer
from compile_callbacks import InductorCompile, InductorConfig

module = Convolutional()
callback = InductorCompile(None, InductorConfig(), baseline_steps=0, verify="off")
for change in (1.0, 2.0):
    module.net[0].weight.data.mul_(change)
    predicted = torch.cat(trainer(callback).predict(module, images()))
    torch.testing.assert_close(predicted, eager(module), rtol=1e-4, atol=1e-5)
infer = callback.report.infer
print(json.dumps([infer.cache_hits, infer.diagnostics.cache_misses,
                  infer.diagnostics.folded_mib, infer.diagnostics.weight_refreshes]))
"""


def test_torchs_cache_returns_folded_graphs(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cold, warm = [json.loads(run_in_new_process(START).splitlines()[-1]) for _ in range(2)]
    assert (cold[:2], warm[:2]) == ([0, 1], [1, 0])
    assert warm[2:] == cold[2:]
    assert cold[2] > 0
    assert cold[3] == 2
    with Folding(0.5).active():
        assert torch.compiler.config.cache_key_tag == "fold_weights=0.5"
    assert torch.compiler.config.cache_key_tag == ""
