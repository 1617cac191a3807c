"""Fits with a torch in which the package does not find its private parts: each ends well, with eager's results."""

from __future__ import annotations

import builtins
import functools
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

from compile_callbacks import CompileWarning, InductorCompile
from tests.support.models import fit

USES = runpy.run_path(str(Path(__file__).parents[2] / ".ci/private_names.py"))["uses"]()
NAMES = {use.port: {each.what for each in USES if (each.kind, each.port) == ("name", use.port)} for use in USES}
ESSENTIAL = NAMES["inductor"] | {"torch._guards.TracingContext"}
"""The names without which graphs run eagerly."""
QUICK = {"dynamo", "inductor"}


class Torch:
    """A module of torch without some names."""

    def __init__(self, module, hidden):
        vars(self).update(_module=module, _hidden=hidden)

    def __getattr__(self, name):
        if f"{self._module.__name__}.{name}" in self._hidden:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        value = getattr(self._module, name)
        return Torch(value, self._hidden) if isinstance(value, types.ModuleType) else value


@pytest.fixture
def hide(monkeypatch):
    """Hide names of torch from the package, because torch itself needs them."""

    def hide(hidden):
        for name, module in list(sys.modules.items()):
            if name.startswith("compile_callbacks._torch."):
                for key, value in list(vars(module).items()):
                    if isinstance(value, types.ModuleType) and value.__name__.startswith("torch"):
                        monkeypatch.setitem(vars(module), key, Torch(value, hidden))
        import_ = builtins.__import__

        def importing(name, scope=None, local=None, names=(), level=0):
            if (scope or {}).get("__name__", "").startswith("compile_callbacks._torch."):
                for each in {f"{name}.{each}" for each in names or ()} & hidden:
                    raise ImportError(f"cannot import name {each!r}")
            return import_(name, scope, local, names, level)

        monkeypatch.setattr(builtins, "__import__", importing)

    monkeypatch.setattr("compile_callbacks._torch.ports._failures", {})
    return hide


@functools.cache
def eager():
    module = fit(max_epochs=3)
    return torch.tensor(module.losses), module.state_dict()


PORTS = sorted(port for port, names in NAMES.items() if names)


@pytest.mark.all_versions
@pytest.mark.parametrize("port", [p if p in QUICK else pytest.param(p, marks=pytest.mark.slow) for p in PORTS])
@pytest.mark.filterwarnings("ignore::compile_callbacks.CompileWarning")
def test_a_fit_without_a_port_ends_well(port, hide, no_codegen):
    losses, weights = eager()
    hide({name for name in NAMES[port] if not name.endswith(".config")})
    callback = InductorCompile(baseline_steps=4)
    module = fit(callback, max_epochs=3)
    torch.testing.assert_close(torch.tensor(module.losses), losses)
    torch.testing.assert_close(module.state_dict(), weights)
    report = callback.report
    if not NAMES[port] & ESSENTIAL:
        assert set(report.train.diagnostics.steps) == {"compiled"}
    if port in QUICK:
        assert f"torch {torch.__version__}: " in str(report)


def test_without_the_slot_for_compiled_code_a_fit_is_eager(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda module, *args: module._call_impl(*args))
    monkeypatch.delattr(torch.nn.Module, "_compiled_call_impl")
    with pytest.warns(CompileWarning, match=f"torch {re.escape(torch.__version__)} calls modules in another way"):
        module = fit(InductorCompile(targets=["net"]), max_epochs=3)
    assert torch.equal(torch.tensor(module.losses), eager()[0])


def test_a_listener_does_not_raise_into_torch(monkeypatch, captured_graph):
    monkeypatch.setattr("compile_callbacks._torch.ports._failures", {})
    monkeypatch.setattr("compile_callbacks.profiling.recorder.CompileProgress.compile_begins", lambda *_: 1 // 0)
    callback = InductorCompile(baseline_steps=0)
    fit(callback)
    assert callback.report.train.diagnostics.steps == {"compiled": 8}
    assert "ZeroDivisionError" in callback.report.train.diagnostics.torch_notes[0]


def test_a_torch_newer_than_the_tested_ones_is_named(monkeypatch):
    callback = InductorCompile(None, None)
    fit(callback)
    assert callback.report.train.diagnostics.torch_notes == ()
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    assert "torch 3.0.0 is newer than the tested versions" in str(callback.report)
