"""Values of every stage on a GPU equal eager's; with CUDA graphs, kept outputs stay valid."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from compile_callbacks import InductorCompile
from tests.cases import zoo
from tests.cases.case import check, net
from tests.cases.test_values import BATCH_NORM, SAME_DROPOUT
from tests.support.models import Classifier, Manual, batches_of, fit, loader, run_folder, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.gpu]

MAKE = {"convolutions": net(zoo.convolutions), "transformer": net(zoo.transformer)}


@functools.cache
def every_stage(name, precision, callback=None):
    """Fit with validation, resumed after the first epoch, then test and predict; each with a ragged last batch.

    Returns each output as a tensor, and the losses of a run as one tensor, because a single loss may be near zero.
    """
    curves, path, callbacks = [], f"{run_folder()}/run.ckpt", [] if callback is None else [callback]
    for epochs, checkpoint in ((1, None), (2, path)):
        module = seeded(MAKE[name])
        settings = {"accelerator": "cuda", "precision": precision, "gradient_clip_val": 0.1}  # so that no run diverges
        run = trainer(*callbacks, max_epochs=epochs, **settings)
        run.fit(module, batches_of(4, 4, 4, 4, 4, 2), batches_of(4, 2), ckpt_path=checkpoint)
        run.save_checkpoint(path)
        curves.append(torch.tensor(module.losses).double())
    (metrics,) = run.test(module, batches_of(4, 2), verbose=False)
    outputs = module.validation_outputs, metrics, run.predict(module, batches_of(4, 2))
    return [*curves, *(torch.as_tensor(leaf).double().cpu() for leaf in torch.utils._pytree.tree_leaves(outputs))]


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.timeout(600)  # max-autotune tries hundreds of kernels for each shape
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 1e-2), ("bf16-mixed", 0.1)])
@pytest.mark.filterwarnings("ignore")  # advice on TensorFloat32 and on GPUs too small for max-autotune
def test_every_stage_equals_eager_on_a_gpu(name, mode, precision, tolerance, monkeypatch):
    """Compares norms, with tolerances for TF32 and bfloat16 after twelve training steps."""
    # torch cannot compile the fast path of `nn.TransformerEncoderLayer` for a GPU (2.11).
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    options = torch._inductor.list_mode_options(mode, None) | SAME_DROPOUT
    callback = InductorCompile({"options": options}, {"options": options | {"freezing": True}}, baseline_steps=0)
    results = every_stage(name, precision, callback)
    for phase in (callback.report.train, callback.report.infer):
        assert phase.graphs >= 1, phase
        assert phase.fallbacks == 0
    for ours, theirs in zip(results, every_stage(name, precision), strict=True):
        assert torch.linalg.vector_norm(ours - theirs) <= tolerance * torch.linalg.vector_norm(theirs)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("case", BATCH_NORM, ids=str)
@pytest.mark.usefixtures("recompiles_at_once")
def test_eager_and_compiled_calls_of_a_batch_norm_share_a_step(case, mode):
    callback = case.callback | {"train_mode": {"mode": mode, "dynamic": False}}
    close = {"rtol": 1e-3, "atol": 1e-4}
    check(dataclasses.replace(case, callback=callback, trainer={"accelerator": "gpu"}, close=close))


class Keeper(Classifier):
    """Keeps outputs of every stage without a copy."""

    def __init__(self):
        super().__init__()
        self.kept = {"train": [], "val": []}

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.kept["train"].append(out.detach())
        loss = torch.nn.functional.cross_entropy(out, batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.kept["val"].append(self(batch[0]))


def run(*callbacks, make=Keeper, **settings):
    settings = {"accelerator": "cuda", "max_epochs": 2, "val_check_interval": 0.5} | settings
    module = fit(*callbacks, make=make, train=12, validation=4, **settings)
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
    for phase in (ours.report.train, ours.report.infer):
        assert phase.graphs >= 1
        assert phase.fallbacks == 0


class Threads(Classifier):
    """Records in which thread each backward pass runs, and may fail in a step."""

    def __init__(self, fails_at):
        super().__init__()
        self.threads, self.fails_at = [], fails_at

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        out.register_hook(lambda gradient: self.threads.append(threading.get_ident()))
        if batch_idx == self.fails_at:
            raise ValueError("a step that fails")
        return torch.nn.functional.cross_entropy(out, batch[1])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("fails_at", [None, 10])
def test_only_backward_passes_of_compiled_steps_run_in_the_thread_of_the_steps(fails_at, mode):
    module, own, later = seeded(lambda: Threads(fails_at)), threading.get_ident(), []
    error = pytest.raises(ValueError, match="a step that fails") if fails_at else contextlib.nullcontext()
    with error:
        trainer(InductorCompile(mode, None, baseline_steps=3), accelerator="cuda").fit(module, loader(12))
    eager, compiled = module.threads[:5], module.threads[5:]  # two more eager steps warm up
    assert own not in eager
    assert compiled == [own] * len(compiled) != []
    x = torch.ones(2, device="cuda", requires_grad=True)
    x.register_hook(lambda gradient: later.append(threading.get_ident()))
    x.sum().backward()
    assert own not in later
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())
