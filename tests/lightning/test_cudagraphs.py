"""CUDA graphs in both phases: kept outputs stay valid, and results are eager's. On a GPU."""

from __future__ import annotations

import threading

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from compile_callbacks import InductorCompile
from compile_callbacks.profiling.step_timer import WARMUP_STEPS
from tests.support.models import Classifier, Manual, loader, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.gpu]


class Keeper(Classifier):
    """Keeps outputs of every stage without a copy."""

    def __init__(self):
        super().__init__()
        self.kept: dict[str, list[torch.Tensor]] = {"train": [], "val": []}

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.kept["train"].append(out.detach())
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.kept["val"].append(self(batch[0]))


def run(*callbacks, make=Keeper, **kwargs):
    module = seeded(make)
    settings = {"accelerator": "cuda", "max_epochs": 2, "val_check_interval": 0.5} | kwargs
    trainer(*callbacks, **settings).fit(module, loader(12), loader(4))
    predictions = trainer(*callbacks, accelerator="cuda").predict(module, loader(4, seed=1))
    return [float(loss) for loss in module.losses], predictions, getattr(module, "kept", None)


@pytest.mark.parametrize(
    ("make", "callbacks", "settings"),
    [
        (Keeper, list, {}),
        (Keeper, list, {"accumulate_grad_batches": 2}),
        (Keeper, list, {"accumulate_grad_batches": 4}),
        (Keeper, list, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Keeper, list, {"gradient_clip_val": 0.1}),
        (Keeper, list, {"inference_mode": False}),
        (Keeper, lambda: [GradientAccumulationScheduler({0: 1, 1: 3})], {}),
        (Manual, list, {}),  # two optimizers
    ],
)
def test_results_equal_eager_and_kept_outputs_stay_valid(make, callbacks, settings):
    ours = InductorCompile("reduce-overhead", "reduce-overhead", baseline_steps=0)
    compiled = run(ours, *callbacks(), make=make, **settings)
    torch.testing.assert_close(compiled, run(*callbacks(), make=make, **settings), rtol=1e-4, atol=1e-5)
    assert (ours.report.train.fallbacks, ours.report.infer.fallbacks) == (0, 0)
    assert min(ours.report.train.graphs, ours.report.infer.graphs) >= 1


def test_step_times_on_a_gpu_come_from_events():
    ours = InductorCompile("reduce-overhead", "reduce-overhead", baseline_steps=10)
    trainer(ours, accelerator="cuda", max_epochs=4).fit(seeded(Classifier), loader(30), loader(10))
    for report in (ours.report.train, ours.report.infer):
        assert report.samples >= 10
        assert 0 < report.compiled_step_ms < 100  # tests/lightning/test_stopwatch.py compares with a stopwatch


class Threads(Classifier):
    """Records in which thread each backward pass runs, and may fail in a step."""

    def __init__(self, fails_at: int | None = None):
        super().__init__()
        self.threads: list[int] = []
        self.fails_at = fails_at

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        out.register_hook(lambda gradient: self.threads.append(threading.get_ident()))
        if batch_idx == self.fails_at:
            raise ValueError("a step that fails")
        return torch.nn.functional.cross_entropy(out, batch[1])


def thread_of_a_backward() -> int:
    found: list[int] = []
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: found.append(threading.get_ident()))
    x.sum().backward()
    return found[0]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fails_at", [None, 10])
def test_only_backward_passes_of_compiled_steps_run_in_the_thread_of_the_steps(fails_at, mode):
    module, own = seeded(lambda: Threads(fails_at)), threading.get_ident()
    fit = trainer(InductorCompile(mode, None, baseline_steps=3), accelerator="cuda", max_epochs=1).fit
    if fails_at is None:
        fit(module, loader(12))
    else:
        with pytest.raises(ValueError, match="a step that fails"):
            fit(module, loader(12))
    eager, compiled = module.threads[: 3 + WARMUP_STEPS], module.threads[3 + WARMUP_STEPS :]
    assert own not in eager
    assert compiled == [own] * len(compiled) != []
    assert thread_of_a_backward() != own
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())
