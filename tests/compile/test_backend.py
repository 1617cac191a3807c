"""`InductorBackend`: states, building on samples, inference, and refused arguments."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from compile_callbacks import CompileError, InductorBackend, compile_phases, restore
from compile_callbacks.inference.backend import TRANSITIONS
from tests.support.backend_models import RUNS, Model, assert_same_state, batch, eagerly, linear, state_of
from tests.support.models import FEATURES
from tests.support.uncached import Uncached
from tests.support.wrong_passes import WrongForward

pytestmark = pytest.mark.usefixtures("dropped_backends_go", "no_codegen")


@pytest.fixture(autouse=True)
def _no_runs_yet():
    RUNS.clear()


class Broken(Uncached):
    def __call__(self, graph, is_inference):
        raise ZeroDivisionError("by design")


@pytest.fixture(scope="module")
def saved():
    backend = InductorBackend().build(linear(), batch())
    state = backend.to_dict()
    backend.deactivate()
    return state


def backend_in(state, saved):
    if state in ("checkpoint_loaded", "deployed"):
        backend = InductorBackend.from_dict(linear(), saved, batch())
        if state == "deployed":
            backend.deploy("cpu")
        return backend
    backend = InductorBackend()
    if state != "init":
        backend.build(linear(), batch())
    if state == "inactive":
        backend.deactivate()
    return backend


CALL = {
    "build": lambda backend: backend.build(linear(), batch()),
    "infer": lambda backend: backend.infer(batch()),
    "deactivate": lambda backend: backend.deactivate(),
    "activate": lambda backend: backend.activate(),
    "deploy": lambda backend: backend.deploy("cpu"),
    "to_dict": lambda backend: backend.to_dict(),
}


@pytest.mark.parametrize("state", TRANSITIONS)
def test_each_state_allows_its_calls_and_refuses_others(saved, state):
    refuses = backend_in(state, saved)
    for call in CALL.keys() - TRANSITIONS[state].keys():
        with pytest.raises(RuntimeError, match=rf"{call}\(\) is not allowed in the state '{state}'; allowed: \w+\(\)"):
            CALL[call](refuses)
        assert refuses.state == state
    for call, after in TRANSITIONS[state].items():
        backend = backend_in(state, saved)
        CALL[call](backend)
        assert (backend.state, repr(backend).endswith(f"{after}>")) == (after, True)
        if "infer" in TRANSITIONS[after]:
            with torch.no_grad():
                torch.testing.assert_close(backend.infer(batch()), linear()(batch()))


@pytest.mark.all_versions
@pytest.mark.codegen
def test_building_runs_each_sample_once_and_restores_the_module():
    module = Model()
    module.net[0][1].eval()
    before, generator = state_of(module), torch.get_rng_state()
    samples = [batch(4), {"x": batch(6), "scale": torch.tensor(2.0)}]
    backend = InductorBackend(verify="off").build(module, samples, device="cpu")
    assert RUNS == [(4, FEATURES), (6, FEATURES)]
    assert module.calls == 0
    assert not any(part.training for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (backend.device, backend.state) == (torch.device("cpu"), "active")

    graphs = backend.report.infer.graphs
    torch.testing.assert_close(backend.infer(batch(4)), eagerly(batch(4)))
    torch.testing.assert_close(backend.infer(x=batch(6), scale=torch.tensor(3.0)), eagerly(batch(6)) * 3)
    assert backend.report.infer.graphs == graphs
    assert module.calls == 2

    module.calls.zero_()
    backend.deactivate()
    assert_same_state(module, before)
    assert backend.report.infer.graphs == graphs


@pytest.mark.all_versions
def test_a_backend_is_activated_from_torchs_cache_and_compared_with_eager():
    module = Model()
    backend = InductorBackend().build(module, batch())
    assert (backend.report.infer.verified, module.calls) == ("equal 1", 0)
    backend.deactivate()
    backend.activate()
    assert (backend.report.infer.cache_hits, backend.report.infer.diagnostics.cache_misses) == (1, 0)
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))


@pytest.mark.all_versions
@pytest.mark.parametrize(
    ("settings", "samples", "device", "error", "text"),
    [
        ({}, [batch(), batch(13)], "cpu", AssertionError, "thirteen, by design"),
        ({"mode": {"passes": (Broken(),)}, "on_error": "raise"}, batch(), "cpu", CompileError, "by design"),
        ({"mode": {"passes": (WrongForward("infer"),)}, "verify": "raise"}, batch(), "cpu", CompileError, "differ"),
        ({}, batch(), "meta", ValueError, "device='meta' cannot be used"),
        ({}, batch(), 0, TypeError, "device=0"),
    ],
)
def test_a_build_that_fails_restores_the_module(settings, samples, device, error, text):
    module = Model()
    module.net[0][1].eval()
    before = state_of(module)
    backend = InductorBackend(**settings)
    with pytest.raises(error, match=text):
        backend.build(module, samples, device)
    assert_same_state(module, before)
    assert (backend.state, backend.device) == ("init", None)
    if not settings:
        torch.testing.assert_close(backend.build(module, batch()).infer(batch()), eagerly(batch()))


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        (None, TypeError, "samples must be a tensor, a tuple .* not NoneType"),
        ([batch(), 3], TypeError, r"samples\[1\] must be a tensor.* not int; \(x,\) is"),
        ([], ValueError, "samples is empty"),
        ({1: batch()}, TypeError, "keywords must be strings"),
    ],
)
def test_wrong_samples_are_refused_by_their_index(samples, error, text):
    with pytest.raises(error, match=text):
        InductorBackend().build(linear(), samples)


@pytest.mark.all_versions
@pytest.mark.parametrize(("fullgraph", "graphs", "eager_calls"), [(False, 2, {"forward": 20}), (True, 3, {})])
def test_inputs_that_no_sample_has_run_eagerly_or_are_compiled_with_fullgraph(fullgraph, graphs, eager_calls):
    backend = InductorBackend({"dynamic": False, "fullgraph": fullgraph}).build(Model(), [batch(2), batch(3)])
    for size in (2, 3, *[5] * 20):
        torch.testing.assert_close(backend.infer(batch(size)), eagerly(batch(size)))
    report = backend.report.infer
    assert (report.graphs, report.diagnostics.eager_calls) == (graphs, eager_calls)


@pytest.mark.all_versions
def test_a_module_that_is_already_compiled_is_refused():
    module = nn.Sequential(linear())
    for part in (module, module[0]):
        compile_phases(part)
        with pytest.raises(ValueError, match="this library already compiled module"):
            InductorBackend().build(module, batch())
        restore(part)
    backend = InductorBackend().build(module, batch())
    with pytest.raises(ValueError, match=r"at 'forward'; undo that first: deactivate\(\)"):
        InductorBackend().build(module, batch())
    with pytest.raises(ValueError, match=r"deactivate\(\)"):
        compile_phases(module)
    with pytest.raises(ValueError, match="this library already compiled module"):
        InductorBackend.from_dict(module, backend.to_dict(), batch())
    backend.deactivate()
    compile_phases(module)
    with pytest.raises(ValueError, match="this library already compiled module"):
        backend.activate()
    assert backend.state == "inactive"
    restore(module)
    with pytest.raises(ValueError, match=r"the result of torch\.compile"):
        InductorBackend().build(torch.compile(module), batch())
    inner = InductorBackend().build(module[0], batch())
    with pytest.raises(ValueError, match="already"):
        compile_phases(module, targets=["0"])
    inner.deactivate()


@pytest.mark.all_versions
def test_a_copy_of_the_module_is_uncompiled_and_a_backend_has_no_copy():
    module = Model()
    backend = InductorBackend().build(module, batch())
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        twin.net = nn.Identity()
        with torch.no_grad():
            torch.testing.assert_close(twin(batch()), batch())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="to_dict"):
            copied(backend)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"mode": "defualt"}, ValueError, "did you mean 'default'"),
        ({"mode": None}, ValueError, "mode=None compiles nothing"),
        ({"mode": {"optoins": {}}}, ValueError, "mode: field='optoins'"),
        ({"verify": "no"}, ValueError, "verify='no'"),
        ({"name": "a\nb"}, ValueError, "name="),
    ],
)
def test_wrong_arguments_are_refused_by_name(settings, error, text):
    with pytest.raises(error, match=text):
        InductorBackend(**settings)
