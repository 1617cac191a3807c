"""Dimensions that vary in eager steps are dynamic in the first graph. Later calls that no graph fits run eagerly."""

from __future__ import annotations

import json
import os
import signal

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from compile_callbacks import GraphPass, InductorCompile
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import Classifier, Wrapper, batches_of, fit, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, batch, times=1, *, mask=None):
        x = self.words(batch["words"])
        if mask is not None:
            x = x * mask[..., None]
        return self.head(x.repeat(1, times, 1).mean(1))


class Words(Classifier):
    """Takes batches of words with a number of repetitions; half of the validation calls have a mask."""

    def __init__(self):
        super().__init__(_Net())

    def training_step(self, batch, batch_idx):
        loss = self.net(*batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        words, times = batch
        mask = (words["words"] > 3).float() if batch_idx % 2 else None
        self.validation_outputs.append(self.net(words, times, mask=mask))


def words(*sizes, times=(1,)):
    """Batches of the given sizes."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        ({"words": torch.randint(10, size, generator=generator)}, times[i % len(times)]) for i, size in enumerate(sizes)
    ]
    return DataLoader(batches, batch_size=None)


def losses(batches, *callbacks, **settings):
    """The losses of `Words` with these batches."""
    return fit(*callbacks, make=Words, train=batches, validation=None, **settings).losses


VARYING = [(4, 5), (4, 5), (6, 7), (4, 5), (5, 9), (6, 5), (3, 8), (4, 4), (1, 6), (1, 8), (8, 3)]


@pytest.mark.parametrize(
    ("batches", "graphs"),
    [
        (words(*VARYING), 1),  # torch would compile batch size 1 separately, which comes twice
        (words(*[(4, 5)] * 9, times=(2, 3, 4, 5, 6)), 1),
    ],
    ids=["dimensions", "integers"],
)
def test_what_varies_in_the_baseline_is_dynamic_in_the_first_graph(batches, graphs):
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    found = losses(batches, callback)
    assert callback.report.train.graphs == graphs
    assert found == pytest.approx(losses(batches), rel=1e-4)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="AOTAutograd marks what it saves, without a guard")
def test_no_mark_is_left_on_the_users_tensors():
    batches = words(*VARYING)
    losses(batches, InductorCompile(infer_mode=None, baseline_steps=3), max_epochs=2)
    for batch, _ in batches.dataset:
        assert not [name for name in vars(batch["words"]) if "weak_dynamic" in name or "marking" in name]


VARYING_LATER = [(4, 5)] * 6 + [(4, 5), (6, 7), (3, 6)] * 8  # after the baseline


def test_cache_dir_remembers_the_shapes_for_the_next_run(tmp_path):
    graphs = []
    for _ in range(2):
        callback = InductorCompile(infer_mode=None, baseline_steps=2, cache_dir=tmp_path)
        losses(words(*VARYING_LATER), callback)
        graphs.append(callback.report.train.graphs)
        torch.compiler.reset()
    assert graphs == [2, 1]
    (file,) = tmp_path.glob("model-*.json")
    assert json.loads(file.read_text())["shapes"] == {"train": {"net": {"args[0]['words']:2": [0, 1]}}}


def test_validation_outside_of_fit_takes_its_graph_from_the_cache_and_is_no_recompile():
    callback = InductorCompile(None, {"dynamic": False}, baseline_steps=0, targets="net")
    module = seeded(Words)
    run = trainer(callback, num_sanity_val_steps=0)
    run.fit(module, words((4, 5)), words((4, 5)))
    for _ in range(8):
        run.validate(module, words((4, 5)), verbose=False)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.cache_hits) == (2, 0, 2 - infer.diagnostics.cache_misses)


class HasSymbols(GraphPass):
    """Records whether each graph has symbolic sizes."""

    hook = "post_grad_post"

    def __init__(self):
        super().__init__()
        self.found: list[bool] = []

    def __call__(self, graph, is_inference):
        values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
        self.found.append(any(isinstance(value, torch.SymInt) for value in values))

    def uuid(self):
        return None


@pytest.mark.parametrize("baseline_steps", [0, 10])
def test_a_smaller_last_batch_runs_eagerly_and_costs_no_graph(baseline_steps):
    callback = InductorCompile(baseline_steps=baseline_steps)
    batches = {"train": batches_of(*[16] * 100, 9), "validation": batches_of(*[16] * 20, 5)}
    assert_fits_as_eager(callback, **batches, max_epochs=3)
    for report, target in ((callback.report.train, "net"), (callback.report.infer, "forward")):
        assert (report.graphs, report.recompiles, report.diagnostics.eager_calls) == (1, 0, {target: 3})


@pytest.mark.parametrize(
    ("sizes", "epochs", "baseline_steps", "graphs", "eager_calls", "is_symbolic"),
    [
        ([4, 4, 4, 4, 3], 9, 10, 1, 7, False),  # of epochs 3 to 9, after the eager steps
        ([4, 4, 4, 4, 3], 10, 10, 2, 7, False),
        ([4] + [4, 3] * 10 + [4, 3, 5, 6, 7] * 6, 1, 0, 3, 14, True),
        (([4] * 14 + [3]) * 20, 1, 0, 1, 20, False),
    ],
    ids=["7 misses", "8 misses", "a third size", "rare misses"],
)
def test_a_second_size_gets_a_static_graph_and_a_third_one_a_symbolic_graph_after_eight_of_100_calls(
    sizes, epochs, baseline_steps, graphs, eager_calls, is_symbolic
):
    symbols = HasSymbols()
    callback = InductorCompile(infer_mode=None, passes=[symbols], baseline_steps=baseline_steps)
    assert_fits_as_eager(callback, train=batches_of(*sizes), max_epochs=epochs)
    train = callback.report.train
    assert (train.graphs, train.diagnostics.eager_calls) == (graphs, {"net": eager_calls})
    assert any(symbols.found) == is_symbolic


def test_lengths_that_the_eager_steps_did_not_show_are_compiled_after_eight_calls():
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    found = losses(words(*[(4, 5)] * 9, *[(4, 6 + i % 7) for i in range(30)]), callback)
    assert callback.report.train.graphs == 2
    assert callback.report.train.diagnostics.eager_calls == {"net": 7}
    assert found == pytest.approx(losses(words(*[(4, 5)] * 9, *[(4, 6 + i % 7) for i in range(30)])), rel=1e-4)


class Changes(Classifier):
    """Changes the network in step 6."""

    def __init__(self, change):
        super().__init__(nn.Sequential(Scale(mlp()), nn.Identity()))
        self.change = change
        if change == "unfreeze":
            self.net[0].net[0].requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 6 and self.change == "unfreeze":
            self.net[0].net[0].requires_grad_(True)
        if batch_idx == 6 and self.change == "attribute":
            self.net[0].scale = 3
        return super().training_step(batch, batch_idx)


class Scale(Wrapper):
    scale = 2

    def forward(self, x):
        return self.net(x) * self.scale


class Breaks(Wrapper):
    def forward(self, x):
        hidden = self.net[:2](x)
        torch._dynamo.graph_break()
        return self.net[2:](hidden)


class Checkpointed(Classifier):
    def logits(self, x):
        return checkpoint(self.net, x.requires_grad_(), use_reentrant=False)


class Reentrant(Classifier):
    """Compares the gradient of a bias in front of dropout with the mask of the forward pass."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 3), nn.Dropout()))

    def training_step(self, batch, batch_idx):
        outputs = checkpoint(self.net, batch[0].clone().requires_grad_(), use_reentrant=True)
        self.kept = outputs != 0
        return outputs.sum()

    def on_after_backward(self):
        torch.testing.assert_close(self.net[0].bias.grad, 2.0 * self.kept.sum(0))


def test_a_reentrant_checkpoint_recomputes_with_the_mask_of_its_forward_pass():
    callback = InductorCompile(infer_mode=None, targets="net", baseline_steps=2)
    fit(callback, make=Reentrant, train=batches_of(*[4] * 10, 3), validation=None)
    assert callback.report.train.diagnostics.eager_calls == {}


class Annealed(Classifier):
    """Passes another float in each step."""

    def __init__(self):
        super().__init__(Divides(smooth()))
        self.temperature = 1.0

    def logits(self, x):
        self.temperature += 0.37
        return self.net(x, self.temperature)


class Divides(Wrapper):
    def forward(self, x, temperature=1.0):
        return torch.tanh(self.net(x) / temperature)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])


FEW_OF_TWO_SIZES = [4, 4, 3, 4, 3]


@pytest.mark.parametrize(
    ("make", "sizes", "settings", "graphs", "eager_calls"),
    [
        (lambda: Changes("unfreeze"), [4] * 30, {"baseline_steps": 2}, 2, {"net": 7}),
        (lambda: Changes("attribute"), [4] * 30, {"baseline_steps": 2}, 2, {"net": 7}),
        (lambda: Classifier(Breaks(mlp())), [4] * 5 + [3] * 12, {}, 4, {"net": 7}),
        (lambda: Checkpointed(smooth()), FEW_OF_TWO_SIZES, {}, 2, {}),
        (lambda: Classifier(smooth()), FEW_OF_TWO_SIZES, {"train_mode": {"fullgraph": True}}, 2, {}),
        (Annealed, [8] * 12 + [8, 3] * 26, {"baseline_steps": 2}, 4, {"net": 21}),
        (lambda: Classifier(blocks()), FEW_OF_TWO_SIZES, {"targets": "net.*"}, 4, {}),
    ],
    ids=["unfreeze", "attribute", "a graph break counts once", "checkpoint", "fullgraph", "float", "equal blocks"],
)
def test_a_call_that_no_graph_fits_counts_or_is_compiled_at_once_if_it_must(make, sizes, settings, graphs, eager_calls):
    callback = InductorCompile(infer_mode=None, **{"targets": "net", "baseline_steps": 0, **settings})
    assert_fits_as_eager(callback, make=make, train=batches_of(*sizes))
    assert (callback.report.train.graphs, callback.report.train.diagnostics.eager_calls) == (graphs, eager_calls)


class Raises(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 4:  # the stance also refuses a first compile
            torch.compiler.set_stance("fail_on_recompile")


def test_torchs_stance_makes_a_call_that_no_graph_fits_an_error():
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    raises = pytest.raises(RuntimeError, match=r"recompile when torch.compile stance is 'fail_on_recompile'")
    with torch.compiler.set_stance("default"), raises:  # restores the stance
        fit(callback, Raises(), train=batches_of(4, 4, 4, 4, 4, 3))
    assert callback.report.train.graphs == 1
    assert callback.report.train.diagnostics.steps == {"compiled": 2}


class _Stops(Classifier):
    """Is asked to stop in its first step, before it calls the target."""

    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def test_no_compile_begins_after_sigterm():
    callback = InductorCompile(targets="net", baseline_steps=0)
    with pytest.raises(SystemExit):
        trainer(callback).fit(seeded(_Stops), loader())
    assert callback.report.train.graphs == 0
    assert "asked to stop" in str(callback.report.train.diagnostics.events)
