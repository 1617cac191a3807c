"""After each entry point the process and the modules are as before, also after an exception."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn

from compile_callbacks import AOTInductorExport, InductorBackend, InductorCompile, compile_phases, export, restore
from compile_callbacks.exporting.loaded_package import ExportError
from tests.support.models import FEATURES, Classifier, loader, mlp, seeded, trainer

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


def state_of(module: nn.Module) -> dict[str, Any]:
    """What an entry point may change and has to restore, next to the settings and hooks that conftest.py compares."""
    return {
        "environ": dict(os.environ),
        "functorch": torch._functorch.config.get_config_copy(),
        "backward threads": torch.autograd.is_multithreading_enabled(),
        "grad": torch.is_grad_enabled(),
        "modules": {name: attributes(part) for name, part in module.named_modules()},
    }


def attributes(module: nn.Module) -> dict[str, Any]:
    """Names of attributes, with the number of entries of each container, and the class of each other value."""
    containers = (dict, list, tuple, set)
    ignored = {"_fabric_optimizers", "_trainer", "_metric_attributes", "losses", "validation_outputs"}
    return {
        name: (type(value).__name__, len(value)) if isinstance(value, containers) else type(value).__name__
        for name, value in vars(module).items()
        if name not in ignored
    }


class Raises(Classifier):
    """Raises in its third training step and in its second prediction."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise KeyError("training")
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        if batch_idx == 1:
            raise KeyError("prediction")
        return super().predict_step(batch, batch_idx)


def run(callbacks, module, entry):
    ours = trainer(*callbacks)
    if entry == "fit":
        ours.fit(module, loader(4), loader(2))
    else:
        getattr(ours, entry)(module, loader(3))


@pytest.fixture(autouse=True)
def _torch_has_compiled_before():
    """Torch sets environment variables and configs of its own at the first compile of a process."""
    net = mlp()
    torch.compile(lambda x: net(x).sum())(X).backward()
    torch._dynamo.reset()


def callback(**settings):
    return InductorCompile(**{"baseline_steps": 1, "verify": "warn"} | settings)


@pytest.mark.parametrize(
    ("entry", "make"), [("fit", Classifier), ("fit", Raises), ("validate", Classifier), ("predict", Raises)]
)
def test_trainer_run_leaves_no_more_than_the_same_run_without_the_callback(entry, make, tmp_path):
    states = []
    for callbacks in ((), (callback(cache_dir=tmp_path),)):
        module = seeded(make)
        with pytest.raises(KeyError) if make is Raises else contextlib.nullcontext():
            run(callbacks, module, entry)
        states.append(state_of(module))
    assert states[1] == states[0]


@pytest.mark.parametrize("fails", [False, True])
def test_compile_phases_and_restore_leave_no_trace(fails, tmp_path):
    module = mlp()
    before = state_of(module)
    compile_phases(module, cache_dir=tmp_path)
    if fails:
        with pytest.raises(RuntimeError, match="shape"):
            module(X[:, :3])
    else:
        module(X).sum().backward()
        with torch.no_grad():
            module(X)
    restore(module)
    assert state_of(module) == before


def test_backend_leaves_no_trace():
    module = mlp()
    before = state_of(module)
    backend = InductorBackend().build(module, X)
    backend.infer(X)
    backend.deactivate()
    assert state_of(module.train()) == before


@pytest.mark.codegen
@pytest.mark.parametrize("entry", ["callback", "export", "export that fails"])
def test_export_leaves_no_trace(entry, tmp_path):
    module = seeded() if entry == "callback" else mlp()
    if entry == "callback":
        trainer().fit(module, loader(1))
    before = state_of(module)
    if entry == "callback":
        run([AOTInductorExport(tmp_path / "net.pt2", target="net", weights="last")], module, "fit")
    elif entry == "export":
        export(module, (X,), tmp_path / "net.pt2")
    else:
        with pytest.raises(ExportError, match="cannot be exported"):
            export(module, (X[:, :3],), tmp_path / "net.pt2")
    assert state_of(module) == before
