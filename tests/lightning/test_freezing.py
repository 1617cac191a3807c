"""A frozen infer phase: weights really folded, and never stale."""

from __future__ import annotations

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from compile_callbacks import CompileWarning, InductorCompile
from compile_callbacks.runtime.freezing import content_hashes
from tests.support.convolutional import Convolutional, eager, images
from tests.support.models import trainer

pytestmark = pytest.mark.all_versions


def frozen(**kwargs):
    return InductorCompile("default", {"options": {"freezing": True}}, baseline_steps=0, **kwargs)


def assert_predicts_as_eager(callback, module):
    predicted = torch.cat(trainer(callback).predict(module, images()))
    torch.testing.assert_close(predicted, eager(module), rtol=1e-4, atol=1e-5)


def folded():
    return counters["inductor"]["binary_folding_conv"] + counters["inductor"]["binary_folding"]


def test_predict_and_test_fold_weights_and_fit_does_not():
    module, callback = Convolutional(), frozen()
    counters.clear()
    trainer(callback).fit(module, images(), images())
    assert folded() == 0
    assert_predicts_as_eager(callback, module)
    assert folded() > 0
    assert not torch._inductor.config.freezing


def optimizer_step(module):
    optimizer = torch.optim.SGD(module.parameters(), 0.5)
    module.train()
    module.net(torch.ones(2, 3, 8, 8)).square().mean().backward()
    optimizer.step()


def load(module):
    torch.manual_seed(5)
    module.load_state_dict({k: torch.rand_like(v.float()).to(v.dtype) for k, v in module.state_dict().items()})


def edit_through_data(module):
    module.net[0].weight.data.mul_(3)


def swap_through_data(module):
    module.net[0].weight.data = torch.ones_like(module.net[0].weight)


def replace_parameter(module):
    module.net[0].weight = nn.Parameter(torch.ones_like(module.net[0].weight))


def exchange_channels(module):
    weight = module.net[0].weight.data
    weight[[0, 1]] = weight[[1, 0]].clone()


@pytest.mark.parametrize(
    "change",
    [optimizer_step, load, edit_through_data, swap_through_data, replace_parameter, exchange_channels],
    ids=lambda f: f.__name__,
)
def test_weights_that_changed_are_never_stale(change):
    module, callback = Convolutional(), frozen()
    assert_predicts_as_eager(callback, module)
    change(module)
    assert_predicts_as_eager(callback, module)


def test_weights_that_stand_still_are_not_frozen_again():
    module, callback = Convolutional(), frozen()
    assert_predicts_as_eager(callback, module)
    graphs = callback.report.infer.graphs
    assert_predicts_as_eager(callback, module)
    trainer(callback).test(module, images(), verbose=False)
    assert callback.report.infer.graphs == graphs


def test_validation_in_fit_follows_the_weights_without_recompiling_each_epoch():
    reference, module, callback = Convolutional(), Convolutional(), frozen()
    for trained, callbacks in ((reference, ()), (module, (callback,))):
        trainer(*callbacks, max_epochs=4).fit(trained, images(), images())
    torch.testing.assert_close(torch.cat(module.outputs), torch.cat(reference.outputs), rtol=1e-4, atol=1e-4)
    assert callback.report.infer.graphs == 1


class SwapsAtStageStart(pl.Callback):
    """As an EMA does: other weights for the stage, copied in through ``.data``, after every other hook."""

    def on_test_start(self, trainer, pl_module):
        pl_module.net[4].weight.data.copy_(torch.ones_like(pl_module.net[4].weight))

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx == 1:
            with torch.no_grad():
                pl_module.net[4].weight.mul_(2)  # user code in the middle of a stage


def test_weights_swapped_for_a_stage_or_edited_in_it_are_seen():
    module, callback = Convolutional(), frozen()
    assert_predicts_as_eager(callback, module)
    module.outputs.clear()
    trainer(callback, SwapsAtStageStart()).test(module, images(), verbose=False)
    compiled, module.outputs = torch.cat(module.outputs), []
    trainer(SwapsAtStageStart()).test(module, images(), verbose=False)
    torch.testing.assert_close(compiled, torch.cat(module.outputs), rtol=1e-4, atol=1e-4)


def test_freezing_in_training_is_warned_about():
    with pytest.warns(CompileWarning, match="train_mode's option 'freezing' has no effect"):
        InductorCompile({"options": {"freezing": True}}, None)


def test_contents_of_every_kind_of_tensor():
    module = nn.Module()
    for index, dtype in enumerate((torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64)):
        module.register_buffer(f"b{index}", torch.ones(2, 3, dtype=dtype).t())
    before = content_hashes(module)
    assert content_hashes(copy.deepcopy(module)) == before
    module.b4[0, 0] = 2j
    assert content_hashes(module) != before
    assert content_hashes(nn.Module()) == ()
