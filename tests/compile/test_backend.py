"""`InductorBackend`: states, building on samples, inference, saving and loading, and refused arguments."""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch
from torch import nn

from compile_callbacks import CompileError, InductorBackend, InductorConfig, compile_phases, graph_pass, restore
from tests.cases.zoo import Calls, custom_operator
from tests.support.models import FEATURES, mlp
from tests.support.passes import WrongForward

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

RUNS = []


def count(x):
    """Count executions, also in compiled code, but not traces."""
    RUNS.append(tuple(x.shape))
    return x


counted = custom_operator("counted", count)


class Model(nn.Module):
    """Has state that inference must not change: a dropout, a batch norm, and a buffer that each call replaces."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(mlp(), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=None):
        assert x.shape[0] != 13, "thirteen, by design"
        self.calls = self.calls + 1
        out = self.net(counted(x))
        return out if scale is None else out * scale


def batch(size=4):
    return torch.linspace(-1, 1, size * FEATURES).reshape(size, FEATURES)


def eagerly(*args, **kwargs):
    with torch.no_grad():
        return Model().eval()(*args, **kwargs)


def state_of(module):
    """The attributes, the training flags and the weights of a module and its submodules."""
    weights = {name: value.tolist() for name, value in module.state_dict().items()}
    return [set(vars(part)) for part in module.modules()], [part.training for part in module.modules()], weights


SAMPLES = [batch(4), {"x": batch(6), "scale": torch.tensor(2.0)}]
TO_SAVE = {"x": batch(6), "scale": 2.0}
CONFIG = InductorConfig(options={"epilogue_fusion": False}, dynamic=False)

TRANSITIONS = {
    "init": {"build": "active"},
    "active": {"infer": "active", "deactivate": "inactive", "to_dict": "active"},
    "inactive": {"activate": "active", "to_dict": "inactive"},
    "checkpoint_loaded": {"activate": "active", "deploy": "deployed", "to_dict": "checkpoint_loaded"},
    "deployed": {"infer": "deployed"},
}
ARGUMENTS = {"build": (Model(), batch()), "infer": (batch(),), "deploy": ("cpu",)}


def call(backend, name):
    return getattr(backend, name)(*ARGUMENTS.get(name, ()))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with a backend's data, and the backend's output for a sample."""
    module = Model()
    module(batch(), scale=1.0)  # in training mode: changes the batch norm's statistics
    backend = InductorBackend(CONFIG, verify="raise", on_error="raise").build(
        module, [TO_SAVE, (batch(3), torch.tensor(3.0))]
    )
    path = tmp_path_factory.mktemp("saved") / "backend.pt"
    torch.save(backend.to_dict(), path)
    result = path, backend.infer(**TO_SAVE)
    backend.deactivate()
    return result


@pytest.fixture
def state(saved):
    return torch.load(saved[0], weights_only=True)


@pytest.mark.parametrize(
    "calls",
    [
        ["build", "to_dict", "infer", "deactivate", "to_dict", "activate", "infer", "deactivate"],
        ["to_dict", "deploy", "infer"],
        ["to_dict", "activate", "infer", "deactivate"],
    ],
)
def test_each_state_allows_its_calls_and_refuses_others(state, calls):
    backend, twin = InductorBackend(), Model().eval()
    if "build" not in calls:
        backend = InductorBackend.from_dict(Model(), state, batch(), verify="raise", on_error="raise")
        twin.load_state_dict(state["state_dict"])
    for name in calls:
        before = backend.state
        for refused in {*ARGUMENTS, "activate", "deactivate", "to_dict"} - TRANSITIONS[before].keys():
            with pytest.raises(RuntimeError, match=rf"{refused}\(\) is not allowed in .* '{before}'; allowed: \w+\(\)"):
                call(backend, refused)
            assert backend.state == before
        result = call(backend, name)
        assert backend.state == TRANSITIONS[before][name]
        assert repr(backend).endswith(f"{backend.state}>")
        if name == "infer":
            torch.testing.assert_close(result, twin(batch()).detach())
    report = backend.report.infer
    assert report.verified == f"equal {report.graphs}"
    if "build" in calls:  # the second compile is torch's cached one
        assert (report.cache_hits, report.diagnostics.cache_misses) == (1, 0)


@pytest.mark.codegen
def test_building_runs_each_sample_once_and_restores_the_module():
    module = Model()
    module.net[0][1].eval()
    before, generator = state_of(module), torch.get_rng_state()
    RUNS.clear()
    backend = InductorBackend(verify="off").build(module, SAMPLES, device="cpu")
    assert RUNS == [(4, FEATURES), (6, FEATURES)]
    assert module.calls == 0
    assert not any(part.training for part in module.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert (backend.device, backend.state) == (torch.device("cpu"), "active")
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # are uncompiled
        twin.net = nn.Identity()
        with torch.no_grad():
            torch.testing.assert_close(twin(batch()), batch())
    graphs = backend.report.infer.graphs
    module.net[0][1].train()  # and `infer` puts it back
    torch.testing.assert_close(backend.infer(batch(4)), eagerly(batch(4)))
    assert not any(part.training for part in module.modules())
    torch.testing.assert_close(backend.infer(x=batch(6), scale=torch.tensor(3.0)), eagerly(batch(6)) * 3)
    assert module.calls == 2
    module.calls.zero_()
    backend.deactivate()
    assert state_of(module) == before
    assert backend.report.infer.graphs == graphs


BROKEN = graph_pass(lambda graph, is_inference: 1 / 0)
X, FAILS, WRONG = batch(), {"passes": (BROKEN,)}, {"passes": (WrongForward("infer"),)}


@pytest.mark.parametrize(
    ("settings", "arguments", "error", "text"),
    [
        ({}, [[X, batch(13)]], AssertionError, "thirteen, by design"),
        ({"mode": FAILS, "on_error": "raise"}, [X], CompileError, "division by zero"),
        ({"mode": WRONG, "verify": "raise"}, [X], CompileError, "differ"),
        ({}, [X, "meta"], ValueError, "device='meta' cannot be used"),
        ({}, [X, 0], TypeError, "device=0"),
        ({}, [None], TypeError, "sample=None must be a tensor, a tuple .* not NoneType"),
        ({}, [[X, 3]], TypeError, "sample=3 must be a tensor.* not int"),
        ({}, [[]], ValueError, "samples is empty"),
    ],
)
def test_a_build_that_fails_restores_the_module(settings, arguments, error, text):
    module, backend = Model(), InductorBackend(**settings)
    module.net[0][1].eval()
    before = state_of(module)
    with pytest.raises(error, match=text):
        backend.build(module, *arguments)
    assert state_of(module) == before
    assert (backend.state, backend.device) == ("init", None)
    if error is AssertionError or "meta" in arguments:
        torch.testing.assert_close(backend.build(module, X).infer(X), eagerly(X))


@pytest.mark.parametrize(("fullgraph", "graphs", "eager_calls"), [(False, 2, {"forward": 20}), (True, 3, {})])
def test_inputs_that_no_sample_has_run_eagerly_or_are_compiled_with_fullgraph(fullgraph, graphs, eager_calls):
    backend = InductorBackend({"dynamic": False, "fullgraph": fullgraph}).build(Model(), [batch(2), batch(3)])
    for size in (2, 3, *[5] * 20):
        torch.testing.assert_close(backend.infer(batch(size)), eagerly(batch(size)))
    report = backend.report.infer
    assert (report.graphs, report.diagnostics.eager_calls) == (graphs, eager_calls)


def test_building_gives_the_numbers_that_the_samples_drew_back():
    module, before = Calls(nn.Linear(FEATURES, 3), lambda net, x: net(x) * random.randint(1, 9)), random.getstate()
    backend = InductorBackend(verify="off").build(module, X)
    assert random.getstate() == before
    backend.deactivate()


def test_a_module_that_is_already_compiled_is_refused():
    new, backend = InductorBackend(), InductorBackend().build(module := nn.Sequential(nn.Linear(FEATURES, 3)), X)
    refused = lambda text: pytest.raises(ValueError, match=text)  # noqa: E731
    with refused(r"at \['forward'\]; undo that first: deactivate\(\)"):
        new.build(module, X)
    with refused(r"deactivate\(\)"):
        compile_phases(module)
    backend.deactivate()
    compile_phases(module[0])
    for function, *arguments in ((new.build, module, X), (backend.activate,)):
        with refused("this library already compiled module"):
            function(*arguments)
    restore(module[0])
    with refused(r"the result of torch\.compile"):
        new.build(torch.compile(module), X)


def test_config_and_weights_are_loaded_and_other_fields_ignored(saved, state):
    module = Model()
    backend = InductorBackend.from_dict(module, {**state, "device": "cuda:7"}, TO_SAVE)
    assert (backend.state, backend.device, backend.config) == ("checkpoint_loaded", None, CONFIG)
    again = backend.to_dict()
    assert again.keys() == state.keys() == {"format", "version", "config", "state_dict"}
    torch.testing.assert_close(again["state_dict"], state["state_dict"], rtol=0, atol=0)
    backend.activate()
    assert repr(backend) == "<InductorBackend: Model, options={epilogue_fusion: False}, dynamic=False, cpu, active>"
    torch.testing.assert_close(backend.infer(**TO_SAVE), saved[1])
    backend.deactivate()
    assert module.training


NO_STATES = (
    *(list, lambda state: state["state_dict"], lambda state: state | {"version": 2}),
    lambda state: state.pop("config") and state,
)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        *((change, ValueError, "state must be data that .*'version': 1") for change in NO_STATES),
        (lambda state: state | {"config": {"mode": "fast"}}, ValueError, "mode='fast'"),
        (lambda state: state["state_dict"].popitem() and state, RuntimeError, r"Missing key.*net\."),
        (lambda state: state["state_dict"].update(calls=X) or state, RuntimeError, r"calls: copying .*\[4, 8\]"),
    ],
)
def test_data_that_do_not_fit_are_refused_by_name(state, change, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        InductorBackend.from_dict(Model(), change(state), TO_SAVE)
