"""The samples of a saved backend: without the user's data, and good to compile on."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from compile_callbacks import InductorBackend

pytestmark = [pytest.mark.all_versions, pytest.mark.usefixtures("dropped_backends_go")]

SECRET = 1234.5678


class Takes(nn.Module):
    """Takes an image, tokens and a mask, as containers and by name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 2, 3)
        self.embedding = nn.Embedding(5, 4)

    def forward(self, batch, *, mask, scale=1.0):
        image, tokens = batch
        return self.conv(image).mean() * scale + (self.embedding(tokens) * mask[:, None]).sum()


def sample(value: float = SECRET):
    image = torch.full((2, 3, 8, 8), value).to(memory_format=torch.channels_last)
    tokens = torch.tensor([[1, 2, 3], [4, 4, 4]])
    return ([image, tokens],), {"mask": torch.tensor([True, False, True]), "scale": 2.0}


def test_saved_samples_hold_no_values():
    backend = InductorBackend().build(Takes(), [sample()])
    file = io.BytesIO()
    torch.save(backend.to_dict(), file)
    backend.deactivate()
    assert torch.tensor(SECRET).numpy().tobytes() not in file.getvalue()
    file.seek(0)
    ((args, kwargs),) = torch.load(file, weights_only=True)["samples"]
    image, tokens = args[0]
    assert (image.device.type, image.shape, image.dtype) == ("meta", (2, 3, 8, 8), torch.float32)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert (tokens.device.type, tokens.dtype) == ("meta", torch.int64)
    assert (kwargs["mask"].dtype, kwargs["scale"]) == (torch.bool, 2.0)


def test_a_loaded_backend_compiles_on_the_saved_shapes_for_the_users_values():
    module = Takes()
    backend = InductorBackend(new_shapes="raise").build(module, [sample()])
    loaded = InductorBackend.from_dict(Takes(), backend.to_dict())
    backend.deactivate()
    before = torch.get_rng_state()
    loaded.deploy("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    graphs = loaded.report.infer.graphs
    args, kwargs = sample()
    with torch.no_grad():
        torch.testing.assert_close(loaded.infer(*args, **kwargs), module(*args, **kwargs))
    assert loaded.report.infer.graphs == graphs
    assert loaded.report.infer.recompiles == 0


@torch.library.custom_op("compile_callbacks_tests::first_steps", mutates_args=())
def first_steps(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    if lengths.min() < 1:
        raise ValueError("every length must be greater than 0")
    return torch.where(torch.arange(x.shape[1]) < lengths[:, None], x, 0)


@first_steps.register_fake
def _(x, lengths):
    return torch.empty_like(x)


class TakesLengths(nn.Linear):
    """Refuses a length of 0."""

    def forward(self, x, lengths):
        return super().forward(first_steps(x, lengths))


def takes_lengths():
    torch.manual_seed(0)
    return TakesLengths(4, 3)


def test_a_loaded_backend_takes_samples_for_a_module_that_refuses_synthetic_ones():
    module, samples = takes_lengths(), [((torch.ones(2, 4), torch.tensor([2, 4])), {})]
    backend = InductorBackend().build(module, samples)
    state = backend.to_dict()
    expected = backend.infer(*samples[0][0])
    backend.deactivate()
    loaded = InductorBackend.from_dict(takes_lengths(), state)
    with pytest.raises(ValueError, match="greater than 0") as raised:
        loaded.deploy("cpu")
    assert "from_dict(samples=...)" in "".join(raised.value.__notes__)
    assert loaded.state == "checkpoint_loaded"
    loaded = InductorBackend.from_dict(takes_lengths(), state, samples=samples)
    loaded.deploy("cpu")
    torch.testing.assert_close(loaded.infer(*samples[0][0]), expected)
    with pytest.raises(TypeError, match=r"samples\[0\] must be a pair"):
        InductorBackend.from_dict(takes_lengths(), state, samples=[3])
