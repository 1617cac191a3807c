"""Losses, outputs and predictions equal eager's, in every stage and in a resumed run, for several kinds of models."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from compile_callbacks import InductorCompile, InductorConfig
from tests.support.models import Classifier, trainer

pytestmark = pytest.mark.all_versions

# Without this option a compiled graph draws other numbers for dropout than eager.
SAME_DROPOUT = {"fallback_random": True}


class ConvNet(nn.Sequential):
    example = (3, 8, 8)

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 4)
        )


class Transformer(nn.Module):
    example = (6, 16)

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.encoder(x).mean(dim=1))


class TwoHeads(nn.Module):
    example = (8,)

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.heads = nn.ModuleDict({"a": nn.Linear(16, 4), "b": nn.Linear(16, 2)})

    def forward(self, x):
        features = self.body(x).relu()
        return {name: head(features) for name, head in self.heads.items()}


class Run(Classifier):
    """Takes one output or a mapping of two, and keeps the outputs of validation and test."""

    def loss(self, out, y):
        if isinstance(out, dict):
            return nn.functional.cross_entropy(out["a"], y) + out["b"].float().square().mean()
        return nn.functional.cross_entropy(out, y)

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        out = self(batch[0])
        self.validation_outputs.append(out)
        self.log("val_loss", self.loss(out, batch[1]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def data(net, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *net.example, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(4, (rows,), generator=generator)), 4)


def every_stage(make, callbacks, **settings):
    """Fit with validation, resumed after the first epoch, then test and predict; each with a ragged last batch."""
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for epochs, checkpoint in ((1, None), (2, Path(folder, "run.ckpt"))):
            torch.manual_seed(3)
            module = Run(make())
            run = trainer(*callbacks, max_epochs=epochs, **settings)
            run.fit(module, data(make, 22, 0), data(make, 6, 1), ckpt_path=checkpoint)
            run.save_checkpoint(Path(folder, "run.ckpt"))
            results.append(module.losses)
        run.test(module, data(make, 6, 2), verbose=False)
        results += [module.validation_outputs, run.predict(module, data(make, 6, 3))]
        return results


@functools.cache
def eager(make, accelerator="cpu", precision="32-true"):
    return every_stage(make, [], accelerator=accelerator, precision=precision)


def options(mode, more):
    resolved = torch._inductor.list_mode_options(mode, None)
    return InductorConfig(options={**resolved, **SAME_DROPOUT, **more})


@pytest.mark.parametrize(("make", "freezing"), [(ConvNet, True), (TwoHeads, False), (Transformer, False)])
@pytest.mark.filterwarnings("ignore:the compiled graphs of target 'forward' use")  # torch 2.11 breaks at the fast path
def test_every_stage_equals_eager(make, freezing):
    modes = options("default", {}), options("default", {"freezing": freezing})
    callback = InductorCompile(*modes, baseline_steps=0)
    results = every_stage(make, [callback])
    report = callback.report
    assert min(report.train.graphs, report.infer.graphs) >= 1
    assert (report.train.fallbacks, report.infer.fallbacks) == (0, 0)
    torch.testing.assert_close(results, eager(make), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [ConvNet, Transformer, TwoHeads])
@pytest.mark.timeout(600)  # max-autotune tries hundreds of kernels for each shape
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-2), ("bf16-mixed", 0.1)])
@pytest.mark.filterwarnings("ignore")  # advice on TensorFloat32 and on GPUs too small for max-autotune
def test_every_stage_equals_eager_on_a_gpu(make, mode, precision, tolerance):
    """Compares norms, with tolerances for TF32 and bfloat16 after twelve training steps."""
    callback = InductorCompile(options(mode, {}), options(mode, {"freezing": True}), baseline_steps=0)
    results = every_stage(make, [callback], accelerator="cuda", precision=precision)
    assert (callback.report.train.fallbacks, callback.report.infer.fallbacks) == (0, 0)
    assert min(callback.report.train.graphs, callback.report.infer.graphs) >= 1
    for ours, theirs in zip(tensors(results), tensors(eager(make, "cuda", precision)), strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= tolerance * torch.linalg.vector_norm(theirs)


def tensors(results):
    """Each output as a tensor, and the losses of a run as one tensor, because a single loss may be near zero."""
    first, second, *stages = results
    curves = [torch.tensor(losses).double() for losses in (first, second)]
    return [*curves, *(leaf.double().cpu() for leaf in torch.utils._pytree.tree_leaves(stages))]
