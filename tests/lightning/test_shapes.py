"""Shapes that vary in the eager steps are dynamic in the first graph; `new_shapes` decides about later ones."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import CompileError, InductorCompile
from compile_callbacks.calls.observed_calls import RETURNING_SHAPE_CALLS
from tests.support.against_eager import assert_fits_as_eager
from tests.support.models import Classifier, batches_of, fit, loader, seeded, trainer

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
        (words(*VARYING), 2),  # torch compiles batch size 1 separately
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


RAGGED_WORDS = [(4, 5)] * 6 + [(6, 7)]  # the ragged batch comes after the baseline


def test_cache_dir_remembers_the_shapes_for_the_next_run(tmp_path):
    graphs = []
    for _ in range(2):
        callback = InductorCompile(infer_mode=None, baseline_steps=2, cache_dir=tmp_path)
        losses(words(*RAGGED_WORDS), callback)
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
    run.validate(module, words((4, 5)), verbose=False)
    infer = callback.report.infer
    assert (infer.graphs, infer.recompiles, infer.cache_hits) == (2, 0, 2 - infer.diagnostics.cache_misses)


RAGGED = {"train": batches_of(4, 4, 3), "validation": batches_of(4, 2)}


@pytest.mark.parametrize(("new_shapes", "graphs"), [("recompile", 2), ("eager", 1)])
def test_a_ragged_last_batch(new_shapes, graphs):
    callback = InductorCompile({"dynamic": False}, {"dynamic": False}, new_shapes=new_shapes, baseline_steps=0)
    assert_fits_as_eager(callback, **RAGGED, max_epochs=2)
    assert (callback.report.train.graphs, callback.report.infer.graphs) == (graphs, graphs)
    assert callback.report.train.recompiles == graphs - 1


@pytest.mark.parametrize(("epochs", "graphs"), [(RETURNING_SHAPE_CALLS - 1, 1), (RETURNING_SHAPE_CALLS, 2)])
def test_a_shape_that_keeps_coming_back_is_compiled_after_all(epochs, graphs):
    callback = InductorCompile({"dynamic": False}, None, new_shapes="eager", baseline_steps=0)
    fit(callback, **RAGGED, max_epochs=epochs)
    assert callback.report.train.graphs == graphs


def test_raise_names_target_phase_and_shapes():
    callback = InductorCompile({"dynamic": False}, None, new_shapes="raise", baseline_steps=0)
    with pytest.raises(CompileError, match=r"'net' was called in the train phase .*\(3, 8\).*new_shapes='raise'"):
        fit(callback, **RAGGED)


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
