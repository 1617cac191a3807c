"""An `InductorBackend` saved as data, without the values of its samples, and loaded, also in another process."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from compile_callbacks import InductorBackend, InductorConfig
from tests.support.backend_models import Scaled
from tests.support.models import FEATURES
from tests.support.processes import run_in_new_process

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go", "no_codegen")]

X = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES)
SECRET = 1234.5678


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A file with a backend's data, and the backend's output for the first sample."""
    torch.manual_seed(3)
    module = Scaled()
    module(X, scale=1.0)  # in training mode: changes the batch norm's statistics
    config = InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    backend = InductorBackend(config, verify="raise", on_error="raise", name="scores")
    backend.build(module, [{"x": X, "scale": 2.0}, (X[:3], torch.tensor(3.0))])
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
backend = InductorBackend.from_dict(Scaled(), torch.load(path, weights_only=True))
backend.deploy("cpu")
x = backend.infer(x=torch.linspace(-1, 1, 32).reshape(4, 8), scale=2.0)
torch.save({"out": x, "graphs": backend.report.infer.graphs, "repr": repr(backend)}, out)
"""


def test_another_process_computes_the_same(saved, tmp_path):
    path, expected = saved
    out = tmp_path / "out.pt"
    run_in_new_process(OTHER_PROCESS, path, out)
    seen = torch.load(out, weights_only=True)
    torch.testing.assert_close(seen["out"], expected)
    assert seen["graphs"] == 2
    assert seen["repr"] == "<scores: Scaled, options={epilogue_fusion: False}, dynamic=False, cpu, deployed>"


def test_settings_and_samples_are_loaded(saved, state):
    assert (state["format"], state["version"]) == ("compile_callbacks.InductorBackend", 1)
    module = Scaled()
    versions = dict(module.state_dict()._metadata)
    backend = InductorBackend.from_dict(module, {**state, "new_shapes": "eager"})  # a field of an older version
    assert (backend.name, backend.state, backend.device) == ("scores", "checkpoint_loaded", torch.device("cpu"))
    assert backend.config == InductorConfig(options={"epilogue_fusion": False}, dynamic=False)
    assert state["state_dict"]._metadata == versions
    again = backend.to_dict()
    assert (again["verify"], again["on_error"]) == ("raise", "raise")
    assert again.keys() == state.keys()
    for name in ("state_dict", "samples"):
        torch.testing.assert_close(again.pop(name), state.pop(name), rtol=0, atol=0)
    assert again == state
    backend.activate()
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
        (without("samples"), ValueError, "state has no 'samples'"),
        (with_(config={"mode": "fast"}), ValueError, "mode='fast'"),
        (with_(samples=[3]), TypeError, r"samples\[0\]"),
        (with_(module="Linear"), ValueError, "of a module of class 'Linear', not of 'Scaled'"),
        (with_weights(without("wide.bias")), ValueError, r"fit module: 'wide\.bias' is missing in state"),
        (with_weights(with_(**{"wide.bias": X})), ValueError, r"'wide\.bias' is a tensor of shape \(4, 8\)"),
    ],
)
def test_data_that_do_not_fit_are_refused_by_name(state, change, error, text):
    module = Scaled()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(error, match=text):
        InductorBackend.from_dict(module, change(state))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


class Opaque:
    pass


def test_what_cannot_be_saved_is_named():
    class Takes(nn.Module):
        def forward(self, x, note):
            return x + 1

    backend = InductorBackend().build(Takes(), {"x": X, "note": [Opaque()]})
    with pytest.raises(ValueError, match=r"samples\[0\]\['note'\]\[0\] is of type Opaque"):
        backend.to_dict()
    assert backend.state == "active"


class Takes(nn.Module):
    """Takes an image, tokens and a mask, in containers and by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 2, 3)
        self.embedding = nn.Embedding(5, 4)

    def forward(self, batch, mask, scale=1.0):
        image, tokens = batch
        return self.conv(image).mean() * scale + (self.embedding(tokens) * mask[:, None]).sum()


def test_saved_samples_have_shapes_and_no_values():
    image = torch.full((2, 3, 8, 8), SECRET).to(memory_format=torch.channels_last)
    tokens = torch.tensor([[1, 2, 3], [4, 4, 4]])
    sample = {"batch": [image, tokens], "mask": torch.tensor([True, False, True]), "scale": 2.0}
    module = Takes()
    backend = InductorBackend().build(module, sample)
    file = io.BytesIO()
    torch.save(backend.to_dict(), file)
    backend.deactivate()
    assert torch.tensor(SECRET).numpy().tobytes() not in file.getvalue()
    file.seek(0)
    state = torch.load(file, weights_only=True)
    (found,) = state["samples"]
    image_, tokens_ = found["batch"]
    assert (image_.device.type, image_.shape, image_.dtype) == ("meta", (2, 3, 8, 8), torch.float32)
    assert image_.is_contiguous(memory_format=torch.channels_last)
    assert (tokens_.device.type, tokens_.dtype) == ("meta", torch.int64)
    assert (found["mask"].dtype, found["scale"]) == (torch.bool, 2.0)

    loaded = InductorBackend.from_dict(Takes(), state)
    generator = torch.get_rng_state()
    loaded.deploy("cpu")
    assert torch.equal(torch.get_rng_state(), generator)
    graphs = loaded.report.infer.graphs
    with torch.no_grad():
        torch.testing.assert_close(loaded.infer(**sample), module(**sample))
    assert (loaded.report.infer.graphs, loaded.report.infer.recompiles) == (graphs, 0)
