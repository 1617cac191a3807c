"""Shapes that vary in the eager steps are dynamic in the first compiled graph; all others stay static."""

from __future__ import annotations

import json

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import InductorCompile
from tests.support.models import seeded, trainer

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


class Words(pl.LightningModule):
    """Takes batches of words with a number of repetitions; half of the validation calls have a mask."""

    def __init__(self):
        super().__init__()
        self.net = _Net()
        self.losses, self.outputs = [], []

    def training_step(self, batch, batch_idx):
        loss = self.net(*batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        words, times = batch
        mask = (words["words"] > 3).float() if batch_idx % 2 else None
        self.outputs.append(self.net(words, times, mask=mask))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def words(*sizes, times=(1,)):
    """Batches of the given sizes."""
    generator = torch.Generator().manual_seed(0)
    batches = [
        ({"words": torch.randint(10, size, generator=generator)}, times[i % len(times)]) for i, size in enumerate(sizes)
    ]
    return DataLoader(batches, batch_size=None)


def fit(train, validation=None, callback=None, **settings):
    module = seeded(Words)
    trainer(*([callback] if callback else []), num_sanity_val_steps=0, **settings).fit(module, train, validation)
    return module


VARYING = [(4, 5), (4, 5), (6, 7), (4, 5), (5, 9), (6, 5), (3, 8), (4, 4), (1, 6), (1, 8), (8, 3)]


def test_dimensions_that_vary_in_the_baseline_are_dynamic_in_the_first_graph():
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    module = fit(words(*VARYING), callback=callback)
    assert callback.report.train.graphs == 2  # torch compiles batch size 1 separately
    assert module.losses == pytest.approx(fit(words(*VARYING)).losses, rel=1e-4)


def test_dimensions_that_do_not_vary_stay_static():
    batches = [(4, length) for length in (5, 6, 7, 8, 9, 10, 11, 12, 13)]
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    fit(words(*batches), callback=callback)
    assert callback.report.train.graphs == 1
    checkpoint = {}
    callback.on_save_checkpoint(None, None, checkpoint)
    (state,) = checkpoint["compile_callbacks"].values()
    assert state["shapes"]["train"] == {"net": {"args[0]['words']:2": [1]}}


def test_all_dimensions_known_to_vary_are_marked_at_the_next_recompile():
    # Without a baseline only the first step is eager, and torch alone would need a third graph for the length.
    batches = [(4, 5), (4, 5), (6, 7), (5, 8), (7, 9)]
    callback = InductorCompile(infer_mode=None, baseline_steps=0)
    fit(words(*batches), callback=callback)
    assert callback.report.train.graphs == 2


def test_integers_that_vary_are_dynamic_in_the_first_graph():
    batches = words(*[(4, 5)] * 9, times=(2, 3, 4, 5, 6))
    callback = InductorCompile(infer_mode=None, baseline_steps=3)
    module = fit(batches, callback=callback)
    assert callback.report.train.graphs == 1
    assert module.losses == pytest.approx(fit(batches).losses, rel=1e-4)


def test_calls_with_and_without_an_argument_are_compiled_once_each():
    train, validation = words(*VARYING[:3]), words(*(size for size in VARYING * 2 if size[0] > 1))
    callback = InductorCompile(None, baseline_steps=5)
    module = fit(train, validation, callback)
    assert callback.report.infer.graphs == 2
    for ours, eager in zip(module.outputs, fit(train, validation).outputs, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="AOTAutograd marks what it saves, without a guard")
def test_no_mark_is_left_on_the_users_tensors():
    batches = words(*VARYING)
    fit(batches, callback=InductorCompile(infer_mode=None, baseline_steps=3), max_epochs=2)
    for batch, _ in batches.dataset:
        assert not [name for name in vars(batch["words"]) if "weak_dynamic" in name or "marking" in name]


def test_dynamic_false_compiles_each_shape():
    callback = InductorCompile({"dynamic": False}, None, baseline_steps=2)
    fit(words(*[(4, 5), (4, 6)] * 4), callback=callback)
    assert callback.report.train.graphs == 2


def test_cache_dir_remembers_the_shapes_for_the_next_run(tmp_path):
    folder = tmp_path / "cache"
    batches = [(4, 5)] * 6 + [(6, 7)]  # the ragged batch comes after the baseline
    graphs = []
    for _ in range(2):
        callback = InductorCompile(infer_mode=None, baseline_steps=2, cache_dir=folder)
        fit(words(*batches), callback=callback)
        graphs.append(callback.report.train.graphs)
        torch.compiler.reset()
    assert graphs == [2, 1]
    (file,) = folder.glob("model-*.json")
    assert json.loads(file.read_text())["shapes"] == {"train": {"net": {"args[0]['words']:2": [0, 1]}}}


def test_a_resumed_run_remembers_the_shapes(tmp_path):
    batches = words(*[(4, 5)] * 6, (6, 7))
    module = seeded(Words)
    first = InductorCompile(infer_mode=None, baseline_steps=2)
    one = trainer(first)
    one.fit(module, batches)
    one.save_checkpoint(tmp_path / "last.ckpt")
    torch.compiler.reset()
    again = InductorCompile(infer_mode=None, baseline_steps=2)
    trainer(again, max_epochs=2).fit(seeded(Words), batches, ckpt_path=tmp_path / "last.ckpt")
    assert (first.report.train.graphs, again.report.train.graphs) == (2, 1)


def test_validation_outside_of_fit_takes_its_graph_from_the_cache_and_is_no_recompile():
    callback = InductorCompile(None, {"dynamic": False}, baseline_steps=0, targets="net")
    module = seeded(Words)
    run = trainer(callback, num_sanity_val_steps=0)
    run.fit(module, words((4, 5)), words((4, 5)))
    run.validate(module, words((4, 5)), verbose=False)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.cache_hits) == (2, 0, 2 - infer.diagnostics.cache_misses)
