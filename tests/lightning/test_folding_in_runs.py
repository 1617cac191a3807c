"""Weight folding under a Trainer: validation follows the weights without a recompile."""

from __future__ import annotations

import lightning.pytorch as pl
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

from compile_callbacks import InductorCompile, InductorConfig
from tests.support.against_eager import FLOAT32, assert_fits_as_eager, assert_same_values
from tests.support.models import FEATURES, Classifier, fit

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

EPOCHS = 5
FOLDS = InductorConfig(fold_weights=True)


def ours(train_mode="default", infer_mode=FOLDS, **kwargs):
    # Verification restores what an eager call changes, buffers among it: a change like any other to folded weights.
    return InductorCompile(train_mode, infer_mode, baseline_steps=0, verify="off", **kwargs)


def assert_validation_follows_the_weights(callback, company, close=FLOAT32, *, ours_first=True, **settings):
    """Train next to another callback, with refreshed weights in each validation; the sanity check is eager."""
    theirs = company()
    callbacks = (callback, theirs) if ours_first else (theirs, callback)
    settings["max_epochs"] = EPOCHS
    assert_same_values(fit(*callbacks, **settings), fit(company(), **settings), close)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.fallbacks) == (1, 0, 0)
    assert infer.diagnostics.weight_refreshes == EPOCHS


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


@pytest.mark.parametrize(
    ("company", "ours_first"),
    [(EditsBeforeValidation, True), (lambda: EditsBeforeValidation(swap), False), (averaging, False)],
)
def test_validation_follows_weights_that_other_callbacks_change(company, ours_first):
    assert_validation_follows_the_weights(ours(), company, ours_first=ours_first)


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
    callback = ours(FOLDS)
    hooks = set(_global_optimizer_post_hooks)
    assert_fits_as_eager(callback, make=ValidatesAsItTrains, max_epochs=2)
    assert callback.report.train.diagnostics.weight_refreshes == 2 * 8
    assert set(_global_optimizer_post_hooks) <= hooks


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["default", "reduce-overhead"])
@pytest.mark.parametrize("company", [EditsBeforeValidation, averaging])
def test_validation_on_a_gpu_follows_the_weights(company, name, precision):
    settings = {"accelerator": "cuda", "precision": precision}
    full = precision == "32-true"
    # Steps that round differently to bfloat16 drift apart.
    callback = ours(name if full else None, InductorConfig(mode=name, fold_weights=True))
    close = {"rtol": 1e-3, "atol": 1e-3} if full else {"rtol": 2e-2, "atol": 2e-2}
    assert_validation_follows_the_weights(callback, company, close, **settings)
    assert callback.report.infer.diagnostics.folded_mib > 0


def test_a_module_that_stays_compiled_follows_its_weights():
    module = fit(ours(targets=["net"], keep_compiled=True)).eval()
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
