"""Weight folding under a Trainer: validation on today's weights without a recompile, told in the report."""

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

EPOCHS = 5


def fit(*callbacks, make=Classifier, epochs=EPOCHS, **settings):
    module = seeded(make)
    trainer(*callbacks, max_epochs=epochs, **settings).fit(module, loader(), loader(2, seed=2))
    return module


def ours(train_mode="default", infer_mode="default", **kwargs):
    # Verification restores what an eager call changes, buffers among it: a change like any other to folded weights.
    return InductorCompile(train_mode, infer_mode, **{"baseline_steps": 0, "verify": "off", **kwargs})


def refreshed_each_stage(callback):
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.fallbacks) == (1, 0, 0)
    assert infer.diagnostics.weight_refreshes == EPOCHS  # each validation; the sanity check is eager
    return True


# ------------------------------------------------------------------------------------------ validation in fit


@pytest.mark.all_versions
@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="this Lightning has none")
def test_validation_under_ema_equals_eager_after_each_epoch_without_a_recompile():
    callback = ours()
    assert_same_values(fit(callback, averaging()), fit(averaging()))
    assert refreshed_each_stage(callback)


class EditsBeforeValidation(pl.Callback):
    """What user code does: other weights for a validation, through ``.data`` and so without a trace."""

    def __init__(self, how):
        self.edit = how

    def on_validation_start(self, trainer, pl_module):
        self.before = {name: p.data.clone() for name, p in pl_module.named_parameters()}
        for parameter in pl_module.parameters():
            self.edit(parameter)

    def on_validation_end(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.before[name])


def swap(parameter):
    parameter.data = parameter.data * 1.5


@pytest.mark.all_versions
@pytest.mark.parametrize("edit", [lambda p: p.data.mul_(1.5), swap], ids=["edited in place", "swapped"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_weights_edited_through_data_before_validation(edit, ours_first):
    callback, theirs = ours(), EditsBeforeValidation(edit)
    callbacks = (callback, theirs) if ours_first else (theirs, callback)
    assert_same_values(fit(*callbacks), fit(EditsBeforeValidation(edit)))
    assert refreshed_each_stage(callback)


def fused_sgd(self):
    return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)


class ValidatesAsItTrains(Classifier):
    """Calls the module without gradients after each optimizer step, as a GAN's or a teacher's user does."""

    configure_optimizers = fused_sgd

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.eval()
        with torch.no_grad():
            self.validation_outputs.append(self.net(batch[0]))
        self.train()


@pytest.mark.all_versions
def test_fused_optimizer_steps_are_seen_within_a_stage():
    callback = ours(InductorConfig(fold_weights=True))
    hooks = set(_global_optimizer_post_hooks)
    assert_same_values(fit(callback, make=ValidatesAsItTrains, epochs=2), fit(make=ValidatesAsItTrains, epochs=2))
    assert callback.report.train.diagnostics.weight_refreshes == 2 * 8
    assert set(_global_optimizer_post_hooks) <= hooks


def edits():
    return EditsBeforeValidation(lambda p: p.data.mul_(1.5))


def averaging():
    return lightning_callbacks.EMAWeightAveraging(decay=0.7)


@pytest.mark.all_versions
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["default", "reduce-overhead"])
@pytest.mark.parametrize("company", [edits, averaging])
def test_validation_on_a_gpu_follows_the_weights(company, name, precision):
    settings = {"accelerator": "cuda", "precision": precision}
    full = precision == "32-true"
    callback = ours(name if full else None, name)  # steps that round differently to bfloat16 drift apart
    close = {"rtol": 1e-3, "atol": 1e-3} if full else {"rtol": 2e-2, "atol": 2e-2}
    assert_same_values(fit(callback, company(), **settings), fit(company(), **settings), close)
    assert refreshed_each_stage(callback)
    assert callback.report.infer.diagnostics.folded_mib > 0


@pytest.mark.all_versions
@pytest.mark.gpu
def test_torchs_cache_takes_folded_graphs_whose_weight_half_it_gave_back():
    saved = counters["aot_autograd"]["autograd_cache_saved"]
    with fresh_cache():
        for batch_size in (4, 8):  # one weight half for both: the second comes from Inductor's cache, kernels and all
            torch._dynamo.reset()
            trainer(ours(targets=["net"]), accelerator="cuda").predict(seeded(Classifier).eval(), loader(2, batch_size))
    assert counters["aot_autograd"]["autograd_cache_saved"] == saved + 2


# ------------------------------------------------------------------------------------------ what is told and what stays


@pytest.mark.all_versions
def test_the_report_tells_of_folded_weights():
    callback = ours()
    module = Convolutional()
    trainer(callback).predict(module, images())
    infer = callback.report.infer
    weights = (8 * 3 * 9 + 8) * 4 / 2**20  # the convolution's, and what is added after it; float32
    assert infer.diagnostics.folded_mib == pytest.approx(weights)
    assert infer.diagnostics.weight_refreshes == 1
    assert callback.report.train.diagnostics.folded_mib is None
    assert "folded weights MiB" in str(callback.report)
    assert json.loads(json.dumps(callback.report.to_dict()))["infer"]["weight_refreshes"] == 1


@pytest.mark.all_versions
def test_a_module_that_stays_compiled_follows_its_weights():
    callback = ours(targets=["net"], keep_compiled=True)
    module = fit(callback, epochs=1).eval()
    x = torch.randn(4, FEATURES)

    def equal():
        with torch.no_grad():
            torch.testing.assert_close(module(x), module.net._call_impl(x), rtol=1e-4, atol=1e-5)

    equal()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5, fused=True)
    module(x).square().mean().backward()
    optimizer.step()
    equal()
    module.train()(x)  # compiled code moves a batch norm's statistics
    module.eval()
    equal()
    module.load_state_dict({name: torch.ones_like(value) for name, value in module.state_dict().items()})
    equal()
    torch._dynamo.reset()


@pytest.mark.all_versions
def test_targets_that_share_weights():
    class Sharing(Classifier):
        def __init__(self):
            super().__init__(mlp())
            self.twin = mlp()
            self.twin[0].weight, self.twin[1] = self.net[0].weight, self.net[1]

        def validation_step(self, batch, batch_idx):
            self.validation_outputs.append(self.net(batch[0]) + self.twin(batch[0]))

    callback = ours()
    assert_same_values(fit(callback, make=Sharing), fit(make=Sharing))
    assert callback.report.infer.diagnostics.folded_mib > 0


@pytest.mark.all_versions
def test_a_pass_sees_the_graph_of_the_user_once():
    seen = []

    @graph_pass
    def watch(graph, is_inference):
        seen.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    module = Convolutional()
    trainer(ours(None, passes=[watch])).predict(module, images())
    assert len(seen) == 1
    assert any("convolution" in target for target in seen[0])
    assert not any("copy_" in target for target in seen[0])


# ------------------------------------------------------------------------------------------ the setting


@pytest.mark.all_versions
def test_it_can_be_switched_off():
    callback = ours(infer_mode=InductorConfig(fold_weights=False))
    fit(callback, epochs=1)
    assert callback.report.infer.diagnostics.folded_mib is None
    assert callback.report.infer.diagnostics.weight_refreshes is None


class WithTeacher(Classifier):
    """A frozen module that is called in training."""

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


@pytest.mark.all_versions
def test_a_teacher_in_training_is_folded_where_asked_for():
    callback = ours(InductorConfig(fold_weights=True))
    assert_same_values(fit(callback, make=WithTeacher, epochs=2), fit(make=WithTeacher, epochs=2))
    assert callback.report.train.diagnostics.folded_mib > 0
    assert callback.report.train.diagnostics.weight_refreshes == 2  # in each epoch's first batch


@pytest.mark.all_versions
def test_a_setting_without_effect_warns():
    with pytest.warns(CompileWarning, match="fold_weights=True has no effect in the train phase"):
        fit(ours(InductorConfig(fold_weights=True)), epochs=1)


@pytest.mark.all_versions
def test_weights_that_are_shards_are_left_alone():
    weight = torch.randn(CLASSES, FEATURES)
    module = nn.Linear(FEATURES, CLASSES, bias=False).requires_grad_(False)
    module.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    recorder = CompileRecorder()
    compiled_target = CompiledTarget(Target("net", module), "infer", InductorConfig(), recorder=recorder)
    x = torch.randn(4, FEATURES, dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled_target(x).a, nn.functional.linear(x, weight))
    (event,) = recorder.events_of("infer", "fold")
    assert event.folded_mib is None
    assert "tensor subclasses" in event.reason


# ------------------------------------------------------------------------------------------ torch's cache

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
found = infer.diagnostics
print(json.dumps([infer.cache_hits, found.cache_misses, found.folded_mib, found.weight_refreshes]))
"""


def test_torchs_cache_gives_folded_graphs_back(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def start():
        return json.loads(run_in_new_process(START).splitlines()[-1])

    cold, warm = start(), start()
    assert cold[:2] == [0, 1]
    assert warm[:2] == [1, 0]
    assert warm[2:] == cold[2:]
    assert cold[2] > 0
    assert cold[3] == 2
    with Folding(0.5).active():
        assert torch.compiler.config.cache_key_tag == "fold_weights=0.5"
    assert torch.compiler.config.cache_key_tag == ""
