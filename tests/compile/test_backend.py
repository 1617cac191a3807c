"""`InductorBackend`: what building does to a module, and what is refused."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn

from compile_callbacks import CompileError, InductorBackend, compile_phases, restore
from tests.support.backend_models import RUNS, SAMPLES, Model, batch, eagerly, linear, looks
from tests.support.models import CLASSES, FEATURES
from tests.support.uncached import Uncached

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]


@pytest.fixture(autouse=True)
def _no_runs_yet():
    RUNS.clear()


class Broken(Uncached):
    def __call__(self, graph, is_inference):
        raise ZeroDivisionError("by design")


def test_building_runs_each_sample_once_and_leaves_no_other_trace():
    module = Model()
    module.net[0][1].eval()
    before, generator = looks(module), torch.get_rng_state()
    samples = [((batch(4),), {}), ([batch(6)], {"scale": torch.tensor(2.0)})]
    backend = InductorBackend().build(module, samples, device="cpu")
    assert RUNS == [(4, FEATURES), (6, FEATURES)]
    assert backend.report.infer.verified is None  # a comparison would be a second run
    assert module.calls == 0
    assert not any(part.training for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (backend.device, backend.state) == (torch.device("cpu"), "active")

    graphs = backend.report.infer.graphs
    torch.testing.assert_close(backend.infer(batch(4)), eagerly(batch(4)))
    torch.testing.assert_close(backend.infer(batch(6), scale=torch.tensor(3.0)), eagerly(batch(6)) * 3)
    assert backend.report.infer.graphs == graphs
    assert module.calls == 2

    module.calls.zero_()
    backend.deactivate()
    after = looks(module)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert backend.report.infer.graphs == graphs


def test_a_backend_is_activated_from_torchs_cache():
    backend = InductorBackend().build(Model(), SAMPLES)
    backend.deactivate()
    backend.activate()
    assert RUNS == [(4, FEATURES)] * 2
    assert (backend.report.infer.cache_hits, backend.report.infer.diagnostics.cache_misses) == (1, 0)
    torch.testing.assert_close(backend.infer(batch()), eagerly(batch()))


@pytest.mark.parametrize(
    ("settings", "samples", "device", "error", "said"),
    [
        ({}, [*SAMPLES, ((batch(13),), {})], "cpu", AssertionError, "thirteen, by design"),
        ({}, [((batch(), 3), {})], "cpu", TypeError, "positional"),
        ({"on_error": "raise"}, SAMPLES, "cpu", CompileError, "by design"),
        ({}, SAMPLES, "meta", ValueError, "device='meta' cannot be used"),
        ({}, SAMPLES, "cuda:99", ValueError, "device='cuda:99' cannot be used"),
        ({}, SAMPLES, "gpu", ValueError, "device='gpu' cannot be used"),
        ({}, SAMPLES, 0, TypeError, "device=0"),
        ({}, [], "cpu", ValueError, "samples is empty"),
    ],
)
def test_a_build_that_fails_leaves_the_module_as_it_was(settings, samples, device, error, said):
    module = Model()
    module.net[0][1].eval()
    before = looks(module)
    broken = settings.get("on_error") == "raise"
    backend = InductorBackend({"passes": (Broken(),)} if broken else "default", **settings)
    with pytest.raises(error, match=said):
        backend.build(module, samples, device)
    after = looks(module)
    assert after[:2] == before[:2]
    torch.testing.assert_close(after[2], before[2], rtol=0, atol=0)
    assert (backend.state, backend.device) == ("init", None)
    if not broken:
        torch.testing.assert_close(backend.build(module, SAMPLES).infer(batch()), eagerly(batch()))


@pytest.mark.parametrize(
    ("samples", "error", "said"),
    [
        (None, TypeError, "samples must be a list of pairs"),
        ("ab", TypeError, "samples must be a list of pairs"),
        (iter(SAMPLES), TypeError, "samples must be a list of pairs"),
        ([*SAMPLES, batch()], TypeError, r"samples\[1\] must be a pair"),
        ([(batch(),)], ValueError, r"samples\[0\] .* 1 parts"),
        ([(batch(), {})], TypeError, r"samples\[0\] must begin with a tuple .* not Tensor"),
        ([((batch(),), [])], TypeError, r"samples\[0\] must end with a mapping .* not list"),
        ([((batch(),), {1: 2})], TypeError, r"samples\[0\] has the keyword argument 1"),
    ],
)
def test_wrong_samples_are_refused_by_their_index(samples, error, said):
    with pytest.raises(error, match=said):
        InductorBackend().build(linear(), samples)


def test_a_sample_is_a_copy_of_what_was_given():
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1)

    x = torch.zeros(3)
    backend = InductorBackend().build(Writes(), [((x,), {})])
    assert x.sum() == 0
    torch.testing.assert_close(backend.infer(x), torch.ones(3))
    torch.testing.assert_close(x, torch.ones(3))  # what infer is given is the module's to change, as eagerly
    backend.deactivate()
    backend.activate()


# ---------------------------------------------------------------------------------------------- other owners


def test_a_module_that_is_compiled_by_this_library_is_refused():
    module = nn.Sequential(linear())
    for part in (module, module[0]):
        compile_phases(part)
        with pytest.raises(ValueError, match="compiled by this library already"):
            InductorBackend().build(module, SAMPLES)
        restore(part)
    backend = InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match=r"at 'forward'; undo that first: deactivate\(\)"):
        InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match=r"deactivate\(\)"):
        compile_phases(module)
    with pytest.raises(ValueError, match="compiled by this library already"):
        InductorBackend.from_dict(module, backend.to_dict())
    backend.deactivate()
    compile_phases(module)
    with pytest.raises(ValueError, match="compiled by this library already"):
        backend.activate()
    assert backend.state == "inactive"
    restore(module)
    with pytest.raises(ValueError, match=r"the result of torch\.compile"):
        InductorBackend().build(torch.compile(module), SAMPLES)


def test_a_copy_of_the_module_is_an_ordinary_one_and_a_backend_has_none():
    module = Model()
    backend = InductorBackend().build(module, SAMPLES)
    twins = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    for twin in twins:
        twin.net = nn.Identity()
        with torch.no_grad():
            torch.testing.assert_close(twin(batch()), batch())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="to_dict"):
            copied(backend)


def test_a_module_that_cannot_be_moved_back_is_uncompiled_all_the_same():
    module = linear()
    backend = InductorBackend().build(module, SAMPLES)
    module.to = mock.Mock(side_effect=MemoryError("by design"))
    with pytest.raises(MemoryError, match="by design"):
        backend.deactivate()
    del module.to
    assert backend.state == "inactive"
    assert set(vars(module)) == set(vars(linear()))


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"mode": "defualt"}, ValueError, "did you mean 'default'"),
        ({"mode": 3}, TypeError, "mode=3"),
        ({"mode": None}, ValueError, "mode=None compiles nothing"),
        ({"mode": "eager"}, ValueError, "mode='eager' compiles nothing"),
        ({"mode": {"optoins": {}}}, ValueError, "mode field='optoins'"),
        ({"on_error": "stop"}, ValueError, "on_error='stop'"),
        ({"name": 3}, TypeError, "name=3"),
        ({"name": "a\nb"}, ValueError, "name="),
    ],
)
def test_bad_arguments_are_refused_by_name(settings, error, said):
    with pytest.raises(error, match=said):
        InductorBackend(**settings)


@pytest.mark.parametrize("module", [None, torch.relu, nn.Linear])
def test_what_is_no_module_is_refused(module):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        InductorBackend().build(module, SAMPLES)


def test_a_module_on_several_devices_is_refused():
    module = nn.Sequential(linear(), nn.Linear(CLASSES, 2, device="meta"))
    with pytest.raises(ValueError, match="several devices, cpu, meta"):
        InductorBackend().build(module, SAMPLES)
    with pytest.raises(ValueError, match="without values"):
        InductorBackend().build(module[1], SAMPLES)
