"""The same run with `InductorCompile` and without: what both must agree on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from compile_callbacks.testing import assert_same_training
from tests.support.models import QUIET, Classifier, loader, seeded

FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}
FLOAT32_ON_GPU = {"rtol": 1e-3, "atol": 1e-4}


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
