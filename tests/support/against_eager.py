"""The same run with `InductorCompile` and without: what both must agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from compile_callbacks import InductorCompile
from compile_callbacks.testing import assert_same_training
from tests.support.models import QUIET, Classifier, fit, loader, seeded, trainer

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
FLOAT32_ON_GPU = {"rtol": 1e-3, "atol": 1e-4}


def assert_run_equals_eager(run: Callable[..., Classifier], *, baseline_steps: int = 0) -> None:
    """Compare losses, weights and buffers, validation outputs and predictions of a run with those of its eager twin.

    ``run`` takes callbacks, trains a module from a fixed seed, and returns it.
    """
    eager = run()
    ours = InductorCompile(baseline_steps=baseline_steps)
    compiled = run(ours)
    assert min(ours.report.train.graphs, ours.report.infer.graphs) >= 1
    assert_same_module(compiled, eager)
    assert_same_values(compiled, eager)
    predictions, expected = (
        torch.cat(trainer(*callbacks).predict(module, loader(2, seed=1)))
        for module, callbacks in ((compiled, [ours]), (eager, []))
    )
    assert (ours.report.train.fallbacks, ours.report.infer.fallbacks) == (0, 0)
    torch.testing.assert_close(predictions, expected, **FLOAT32)
    assert_same_module(compiled, eager)


def assert_fits_as_eager(
    callback: pl.Callback,
    *,
    make: Callable[[], Classifier] = Classifier,
    train: Any = 8,
    validation: Any = 2,
    tolerance: float = 1e-4,
    **settings: Any,
) -> Classifier:
    """Train with the callback and without it, compare the runs and the modules, and return the compiled module.

    A number of batches stands for a loader of them.
    """
    modules: list[Classifier] = []

    def make_module() -> Classifier:
        modules.append(seeded(make))
        return modules[-1]

    def data() -> pl.LightningDataModule:
        loaders = [loader(given) if isinstance(given, int) else given for given in (train, validation)]
        module = pl.LightningDataModule()
        module.train_dataloader = lambda: loaders[0]
        if validation is not None:
            module.val_dataloader = lambda: loaders[1]
        return module

    kwargs = {**QUIET, **settings}
    assert_same_training(make_module, data, steps=-1, callback=callback, trainer_kwargs=kwargs, tolerance=tolerance)
    eager, compiled = modules[:2]
    assert eager.losses[0] != eager.losses[-1]
    assert_same_module(compiled, eager)
    return compiled


def assert_same_fit(*ours: pl.Callback, close: Mapping[str, float] = FLOAT32, **arguments: Any) -> None:
    """Train with callbacks and without them, and compare the values and the modules.

    For several callbacks, and for a run in which nothing is compiled, which `assert_same_training` does not accept.
    """
    compiled, eager = fit(*ours, **arguments), fit(**arguments)
    assert_same_values(compiled, eager, close)
    assert_same_module(compiled, eager)


def assert_same_values(ours: Classifier, eager: Classifier, close: Mapping[str, float] = FLOAT32) -> None:
    """What both saw while they ran, and how they came out of it."""
    assert len(eager.losses) > 1
    assert eager.losses[0] != eager.losses[-1]
    torch.testing.assert_close(ours.losses, eager.losses, **close)
    torch.testing.assert_close(ours.validation_outputs, eager.validation_outputs, **close)
    torch.testing.assert_close(dict(ours.state_dict()), dict(eager.state_dict()), **close)


def assert_same_gradients(ours: nn.Module, eager: nn.Module, *inputs: torch.Tensor) -> None:
    """Run a forward and a backward pass of both modules, and compare the gradients of their weights."""
    found = []
    for module in (ours, eager):
        module.zero_grad()
        module(*inputs).square().sum().backward()
        found.append({name: parameter.grad for name, parameter in module.named_parameters()})
    torch.testing.assert_close(*found, **FLOAT32)


def assert_same_module(ours: nn.Module, eager: nn.Module) -> None:
    """Nothing is on a module, or on one within it, that is not on its eager twin."""
    assert [_attributes(module) for module in ours.modules()] == [_attributes(module) for module in eager.modules()]


def _attributes(module: nn.Module) -> Any:
    hooks = {name: len(value) for name, value in vars(module).items() if name.endswith("_hooks")}
    return type(module), set(vars(module)), hooks, [p.requires_grad for p in module.parameters()]
