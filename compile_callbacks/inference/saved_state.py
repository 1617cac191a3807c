"""The samples of an `InductorBackend`, and the checks of the data that its ``to_dict`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from compile_callbacks._utils.errors import with_code

FORMAT = "compile_callbacks.InductorBackend"
VERSION = 1  # increase it with each change that an older version of this library would misread

Sample = tuple[Any, ...] | dict[str, Any]
"""The arguments of one call: positional arguments, or keyword arguments."""

SampleLike = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""One sample as users pass it."""


def as_samples(samples: object) -> list[Sample]:
    """Check one sample or a list of samples, and copy their tensors to the CPU, so that a call cannot change them."""
    if not isinstance(samples, list):
        return [_as_sample("samples", samples)]
    if not samples:
        raise ValueError(with_code("CC609", "samples is empty; compiling a module needs at least one sample"))
    return [_as_sample(f"samples[{index}]", sample) for index, sample in enumerate(samples)]


def _as_sample(where: str, sample: object) -> Sample:
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if not isinstance(sample, (tuple, Mapping)):
        text = (
            f"{where} must be a tensor, a tuple of positional arguments or a mapping of keyword arguments, not "
            f"{type(sample).__name__}; (x,) is the sample for a call f(x)"
        )
        raise TypeError(with_code("CC609", text))
    plain = dict(sample) if isinstance(sample, Mapping) else sample
    with torch.inference_mode(False):  # torch compiles another graph for inference tensors
        copied: Sample = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), plain)
    return copied


def on_device(sample: Sample, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy a sample to a device, and return its positional and its keyword arguments."""
    copied: Any = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), sample)
    return ((), copied) if isinstance(copied, dict) else (copied, {})


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the format and the weights."""
    weights = module.state_dict()  # has an attribute with the versions of the modules, which `torch.save` keeps
    for name, value in weights.items():
        weights[name] = _plain(value, name)
    return {"format": FORMAT, "version": VERSION, "state_dict": weights}


def _plain(value: Any, name: str) -> Any:
    """Move tensors in lists, tuples and dicts to the CPU, for ``torch.load(weights_only=True)``. Refuse other objects.

    CPU tensors share their memory with the result.
    """

    def plain(leaf: Any) -> Any:
        if type(leaf) in (torch.Tensor, nn.Parameter):
            return leaf.detach().cpu()
        if leaf is None or type(leaf) in (bool, int, float, str):
            return leaf
        text = f"state_dict[{name!r}] has a value of type {type(leaf).__name__}, which cannot be saved as plain data"
        raise ValueError(with_code("CC607", text))

    return tree_map(plain, value, is_leaf=lambda node: type(node) not in (list, tuple, dict))


def check_state(data: object) -> None:
    """Check that this library can read the data."""
    if not isinstance(data, Mapping):
        text = f"state must be the mapping that InductorBackend.to_dict() returned, not {type(data).__name__}"
        raise TypeError(with_code("CC607", text))
    for name, expected in (("format", FORMAT), ("version", VERSION)):
        if (value := data.get(name)) != expected:
            text = f"state has the {name} {value!r}, and this library reads {name} {expected!r}"
            raise ValueError(with_code("CC607", text))
    for name in ("config", "state_dict"):
        if name not in data:
            raise ValueError(with_code("CC607", f"state has no {name!r}"))


def load_weights(data: Mapping[str, Any], module: nn.Module) -> None:
    """Load the saved weights into a module."""
    saved, expected = (
        {key: _describe(value) for key, value in weights.items()}
        for weights in (data["state_dict"], module.state_dict())
    )
    # `load_state_dict` also checks names and shapes, but only while it changes the weights, and it converts dtypes.
    if key := next((key for key in expected | saved if expected.get(key) != saved.get(key)), None):
        text = (
            f"state['state_dict'] does not fit module: {key!r} is {saved.get(key, 'missing')} in state, and "
            f"{expected.get(key, 'missing')} in module"
        )
        raise ValueError(with_code("CC607", text))
    module.load_state_dict(data["state_dict"])


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if torch.is_tensor(value) else "not a tensor"
