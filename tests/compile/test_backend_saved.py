"""An `InductorBackend` as data: what is in it, who may read it, and another process that does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compile_callbacks import InductorBackend, InductorConfig, graph_pass
from tests.support.backend_models import Scaled
from tests.support.models import FEATURES
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)


SAMPLES = [((X,), {"scale": 2.0}), ((X[:3],), {"scale": torch.tensor(3.0)})]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A backend's data in a file, its key, and what it gave for the first sample."""
    torch.manual_seed(3)
    module = Scaled()
    module(X, scale=1.0)  # in training mode: the batch norm's statistics are no longer those of a new one
    config = InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    backend = InductorBackend(config, on_error="raise", new_shapes="eager", name="scores").build(module, SAMPLES)
    path = tmp_path_factory.mktemp("saved") / "backend.pt"
    torch.save(backend.to_dict(), path)
    result = path, backend.key(), backend.infer(X, scale=2.0)
    backend.deactivate()
    return result


@pytest.fixture
def state(saved):
    return torch.load(saved[0], weights_only=True)


OTHER_PROCESS = """
import sys
import torch
from tests.support.backend_models import Scaled
from compile_callbacks import InductorBackend

path, out = sys.argv[1:]
backend = InductorBackend.from_dict(Scaled(), torch.load(path, weights_only=True))
key = backend.key()
backend.deploy("cpu")
x = backend.infer(torch.linspace(-1, 1, 32).reshape(4, 8), scale=2.0)
torch.save({"key": key, "out": x, "graphs": backend.report.infer.graphs, "says": backend.describe()}, out)
"""


def test_another_process_gives_the_same(saved, tmp_path):
    path, key, expected = saved
    out = tmp_path / "out.pt"
    run_in_new_process(OTHER_PROCESS, path, out)
    seen = torch.load(out, weights_only=True)
    torch.testing.assert_close(seen["out"], expected, rtol=0, atol=0)
    assert seen["key"] == key
    assert seen["graphs"] == 2
    assert seen["says"] == "scores: Scaled, options={epilogue_fusion: False}, dynamic=False, cpu, deployed"


def test_settings_and_samples_come_back(saved, state):
    assert (state["format"], state["version"]) == ("compile_callbacks.InductorBackend", 1)
    module = Scaled()
    versions = dict(module.state_dict()._metadata)
    backend = InductorBackend.from_dict(module, state)
    assert (backend.name, backend.state, backend.device) == ("scores", "checkpoint_loaded", torch.device("cpu"))
    assert backend.config == InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    assert state["state_dict_metadata"] == versions
    again = backend.to_dict()
    assert (again["on_error"], again["new_shapes"]) == ("raise", "eager")
    assert again.keys() == state.keys()
    for name in ("state_dict", "samples"):
        torch.testing.assert_close(again.pop(name), state.pop(name), rtol=0, atol=0)
    assert again == state
    backend.activate()
    torch.testing.assert_close(backend.infer(X, scale=2.0), saved[2], rtol=0, atol=0)
    backend.deactivate()
    assert module.training


def test_deploying_where_there_is_no_such_device_leaves_the_backend_loaded(state):
    backend = InductorBackend.from_dict(Scaled(), {**state, "device": "cuda:7"})
    with pytest.raises(ValueError, match="device='cuda:7' cannot be used"):
        backend.deploy()
    with pytest.raises(TypeError, match="device=3"):
        backend.deploy(3)
    assert (backend.state, backend.device) == ("checkpoint_loaded", torch.device("cuda:7"))
    backend.deploy("cpu")
    assert backend.device == torch.device("cpu")


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_(**changed):
    return lambda state: {**state, **changed}


def with_weights(change):
    return lambda state: {**state, "state_dict": change(dict(state["state_dict"]))}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (list, TypeError, "state must be a mapping .* not list"),
        (lambda state: state["state_dict"], ValueError, "state is of the format None"),
        (with_(format="torchscript"), ValueError, "format 'torchscript'"),
        (with_(version=2), ValueError, "version 2, where this library reads 1"),
        (without("samples"), ValueError, "state lacks 'samples'"),
        (with_(config="default"), TypeError, r"state\['config'\] is a str"),
        (with_(config={"mode": "fast"}), ValueError, "mode='fast'"),
        (with_(on_error="stop"), ValueError, "on_error='stop'"),
        (with_(new_shapes="no"), ValueError, "new_shapes='no'"),
        (with_(name=""), ValueError, "name=''"),
        (with_(device="gpu"), ValueError, r"state\['device'\]='gpu'"),
        (with_(samples=[]), ValueError, "samples is empty"),
        (with_(samples=[3]), TypeError, r"samples\[0\]"),
        (with_(module="Linear"), ValueError, "class 'Linear', and module is a 'Scaled'"),
        (
            with_weights(without("wide.bias")),
            ValueError,
            r"state_dict'\] does not fit module: 'wide\.bias' is missing in state",
        ),
        (with_weights(with_(extra=X)), ValueError, "'extra' is a tensor .* in state, and missing in module"),
        (with_weights(with_(**{"wide.bias": X})), ValueError, r"'wide\.bias' is a tensor of shape \(4, 8\)"),
        (with_weights(with_(**{"wide.bias": torch.zeros(16).double()})), ValueError, r"torch\.float64 in state"),
        (with_weights(with_(**{"wide.bias": 3})), ValueError, r"'wide\.bias' is not a tensor in state"),
    ],
)
def test_data_that_does_not_fit_is_refused_by_name(state, change, error, said):
    module = Scaled()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=said):
        InductorBackend.from_dict(module, change(state))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


def test_a_module_that_does_not_fit_is_refused(state):
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        InductorBackend.from_dict(Scaled, state)
    with pytest.raises(ValueError, match="class 'Scaled', and module is a 'Linear'"):
        InductorBackend.from_dict(nn.Linear(2, 2), state)
    with pytest.raises(ValueError, match=r"'wide\.weight' is a tensor of shape \(16, 3\)"):
        InductorBackend.from_dict(Scaled(width=5), state)
    with torch.device("meta"), pytest.raises(ValueError, match="without values"):
        InductorBackend.from_dict(Scaled(), state)


class Opaque:
    pass


def test_what_cannot_be_written_down_is_named():
    @graph_pass
    def local(graph, is_inference):
        pass

    backend = InductorBackend({"passes": (local,)}).build(nn.ReLU(), [((X,), {})])
    with pytest.raises(ValueError, match=r"cannot be saved: .* at the top level"):
        backend.to_dict()

    class Takes(nn.Module):
        def forward(self, x, *, note):
            return x + 1

    backend = InductorBackend().build(Takes(), [((X,), {"note": [Opaque()]})])
    with pytest.raises(ValueError, match=r"samples\[0\] kwargs\['note'\]\[0\] is of type Opaque"):
        backend.to_dict()
    assert backend.state == "active"


def test_the_key_tells_settings_and_architectures_apart(state):
    def key(module=None, **changed):
        return InductorBackend.from_dict(module or Scaled(), {**state, **changed}).key()

    assert key() == key(name="other", samples=[[[X], {}]], on_error="eager")
    others = [key(config={"mode": "lite"}), key(device="cuda:0")]
    frozen = Scaled()
    frozen.net[1].eps = 1e-3  # told by what it prints
    others.append(key(frozen))
    assert key(device="cuda:0") == key(device="cuda:1")
    assert len({key(), *others}) == 4
