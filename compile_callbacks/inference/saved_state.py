"""The samples of an `InductorBackend`, and the checks of the data that its ``to_dict`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks._utils.errors import with_code

FORMAT = "compile_callbacks.InductorBackend"
VERSION = 1  # increase it with each change that an older version of this library would misread

Sample = tuple[Any, ...] | dict[str, Any]
"""The arguments of one call: positional arguments, or keyword arguments."""

SampleLike = torch.Tensor | tuple[Any, ...] | Mapping[str, Any]
"""One sample as users pass it."""


def as_samples(samples: object) -> list[Sample]:
    """Check one sample or a list of samples, and copy their tensors to the CPU, so that a call cannot change them."""
    copies: list[Sample] = []
    for sample in samples if isinstance(samples, list) else [samples]:
        if not isinstance(sample, (torch.Tensor, tuple, Mapping)):
            text = (
                "a sample must be a tensor, a tuple of positional arguments or a mapping of keyword arguments, not "
                f"{type(sample).__name__}; (x,) is the sample for a call f(x)"
            )
            raise TypeError(with_code("CC609", text))
        plain = dict(sample) if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
        with torch.inference_mode(False):  # torch compiles another graph for inference tensors
            copies.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), plain))
    if not copies:
        raise ValueError(with_code("CC609", "samples is empty; compiling a module needs at least one sample"))
    return copies


def on_device(sample: Sample, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy a sample to a device, and return its positional and its keyword arguments."""
    copied: Any = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), sample)
    return ((), copied) if isinstance(copied, dict) else (copied, {})


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return the format, and the weights as CPU tensors, which share the memory of a module on the CPU."""
    weights = module.state_dict()  # has an attribute with the versions of the modules, which `torch.save` keeps
    for name, value in weights.items():
        weights[name] = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    return {"format": FORMAT, "version": VERSION, "state_dict": weights}


def check_state(data: Mapping[str, Any], module: nn.Module) -> None:
    """Check that this library can read the data, and that the weights fit a module."""
    expected = {"format": FORMAT, "version": VERSION}
    found = {name: data.get(name) for name in expected} if isinstance(data, Mapping) else data
    if found != expected or not {"config", "state_dict"} <= data.keys():
        text = f"state must be data that InductorBackend.to_dict() of this version returned, with {expected}"
        raise ValueError(with_code("CC607", text))
    saved, own = ({key: _describe(v) for key, v in each.items()} for each in (data["state_dict"], module.state_dict()))
    # `load_state_dict` also checks names and shapes, but only while it changes the weights, and it converts dtypes.
    if key := next((key for key in own | saved if own.get(key) != saved.get(key)), None):
        text = (
            f"state['state_dict'] does not fit module: {key!r} is {saved.get(key, 'missing')} in state, and "
            f"{own.get(key, 'missing')} in module"
        )
        raise ValueError(with_code("CC607", text))


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}" if torch.is_tensor(value) else "not a tensor"
