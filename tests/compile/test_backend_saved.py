"""The config and weights of an `InductorBackend` saved as data, and loaded, also in another process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from compile_callbacks import InductorBackend, InductorConfig
from tests.support.backend_models import Scaled
from tests.support.models import FEATURES
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
SAMPLES = [{"x": X, "scale": 2.0}, (X[:3], torch.tensor(3.0))]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with a backend's data, and the backend's output for the first sample."""
    torch.manual_seed(3)
    module = Scaled()
    module(X, scale=1.0)  # in training mode: changes the batch norm's statistics
    config = InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    backend = InductorBackend(config, verify="raise", on_error="raise").build(module, SAMPLES)
    path = tmp_path_factory.mktemp("saved") / "backend.pt"
    torch.save(backend.to_dict(), path)
    result = path, backend.infer(x=X, scale=2.0)
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
sample = {"x": torch.linspace(-1, 1, 32).reshape(4, 8), "scale": 2.0}
state = torch.load(path, weights_only=True)
backend = InductorBackend.from_dict(Scaled(), state, sample, verify="raise", on_error="raise", name="scores")
backend.deploy("cpu")
torch.save({"out": backend.infer(**sample), "graphs": backend.report.infer.graphs, "repr": repr(backend)}, out)
"""


def test_another_process_computes_the_same(saved, tmp_path):
    path, expected = saved
    out = tmp_path / "out.pt"
    run_in_new_process(OTHER_PROCESS, path, out)
    seen = torch.load(out, weights_only=True)
    torch.testing.assert_close(seen["out"], expected)
    assert seen["graphs"] == 1
    assert seen["repr"] == "<scores: Scaled, options={epilogue_fusion: False}, dynamic=False, cpu, deployed>"


def test_config_and_weights_are_loaded_and_other_fields_ignored(saved, state):
    assert (state["format"], state["version"]) == ("compile_callbacks.InductorBackend", 1)
    module = Scaled()
    versions = dict(module.state_dict()._metadata)
    older = {**state, "new_shapes": "eager", "verify": "off", "name": "old", "device": "cuda:7", "module": "Other"}
    backend = InductorBackend.from_dict(module, older, SAMPLES, name="scores")
    assert (backend.name, backend.state, backend.device) == ("scores", "checkpoint_loaded", None)
    assert backend.config == InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    assert state["state_dict"]._metadata == versions
    again = backend.to_dict()
    assert again.keys() == state.keys() == {"format", "version", "config", "state_dict"}
    torch.testing.assert_close(again.pop("state_dict"), state.pop("state_dict"), rtol=0, atol=0)
    assert again == state
    backend.activate()
    assert backend.device == torch.device("cpu")
    torch.testing.assert_close(backend.infer(x=X, scale=2.0), saved[1])
    backend.deactivate()
    assert module.training


def without(name):
    return lambda state: {key: value for key, value in state.items() if key != name}


def with_(**changed):
    return lambda state: {**state, **changed}


def with_weights(change):
    return lambda state: {**state, "state_dict": change(dict(state["state_dict"]))}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (list, TypeError, "state must be the mapping .* not list"),
        (lambda state: state["state_dict"], ValueError, "state has the format None"),
        (with_(version=2), ValueError, "version 2, and this library reads version 1"),
        (without("config"), ValueError, "state has no 'config'"),
        (with_(config={"mode": "fast"}), ValueError, "mode='fast'"),
        (with_weights(without("wide.bias")), ValueError, r"fit module: 'wide\.bias' is missing in state"),
        (with_weights(with_(**{"wide.bias": X})), ValueError, r"'wide\.bias' is a tensor of shape \(4, 8\)"),
    ],
)
def test_data_that_do_not_fit_are_refused_by_name(state, change, error, text):
    module = Scaled()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=text):
        InductorBackend.from_dict(module, change(state), SAMPLES)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


class WithExtraState(nn.Linear):
    def get_extra_state(self):
        return {"notes": [object()]}


def test_what_cannot_be_saved_is_named():
    backend = InductorBackend().build(WithExtraState(FEATURES, 2), X)
    with pytest.raises(ValueError, match=r"state_dict\['_extra_state'\] has a value of type object"):
        backend.to_dict()
    assert backend.state == "active"
