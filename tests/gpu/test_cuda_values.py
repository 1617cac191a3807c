"""Values of every stage on a GPU equal eager's; with CUDA graphs, kept outputs stay valid."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from compile_callbacks import InductorCompile
from tests.cases import zoo
from tests.cases.case import check, net
from tests.cases.test_values import BATCH_NORM, SAME_DROPOUT
from tests.support.models import batches_of, run_folder, seeded, trainer

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
@pytest.mark.usefixtures("recompiles_at_once")
def test_eager_and_compiled_calls_of_a_batch_norm_share_a_step(mode):
    callback = BATCH_NORM.callback | {"train_mode": {"mode": mode, "dynamic": False}}
    close = {"rtol": 1e-3, "atol": 1e-4}
    check(dataclasses.replace(BATCH_NORM, callback=callback, trainer={"accelerator": "gpu"}, close=close))
