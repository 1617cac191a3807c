"""Checks, converts and loads the samples of an `InductorBackend` and the data that its ``to_dict`` returns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from compile_callbacks._utils.errors import with_code

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


def on_device(sample: Sample, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy a sample to a device, and return its positional and its keyword arguments."""
    copied: Any = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, copy=True), sample)
    return ((), copied) if isinstance(copied, dict) else (copied, {})


def without_values(samples: list[Sample]) -> Any:
    """Convert samples to plain containers and values, and move tensors to the meta device, which drops their values."""
    plain = as_plain(samples, "samples")
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), plain)


def with_synthetic_values(samples: list[Any]) -> Any:
    """Replace tensors on the meta device by CPU tensors of random numbers between 0 and 1, or of 0 for integers."""

    def synthetic(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        filled = torch.empty_like(tensor, device="cpu")
        if not (filled.is_floating_point() or filled.is_complex()):
            return filled.zero_()
        return filled.copy_(torch.rand(filled.shape, generator=torch.Generator().manual_seed(0)))

    return tree_map_only(torch.Tensor, synthetic, samples)


def as_plain(value: Any, where: str) -> Any:
    """Copy containers and move tensors to the CPU, for ``torch.load(weights_only=True)``. Refuse any other value.

    CPU tensors share their memory with the result. ``where`` is the name of the value in messages.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (torch.Tensor, nn.Parameter):
        return value.detach().cpu()
    if kind in (list, tuple):
        return kind(as_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                text = f"{where} has the key {key!r} of type {type(key).__name__}; plain data has string keys"
                raise ValueError(with_code("CC607", text))
        return {key: as_plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    text = f"{where} is of type {kind.__name__}, which cannot be saved as plain data and tensors"
    raise ValueError(with_code("CC607", text))


def _as_sample(where: str, sample: object) -> Sample:
    if isinstance(sample, torch.Tensor):
        sample = (sample,)
    if isinstance(sample, Mapping):
        sample = dict(sample)
        if odd := [name for name in sample if not isinstance(name, str)]:
            text = f"{where} has the keyword argument {odd[0]!r}, which is not a string"
            raise TypeError(with_code("CC609", text))
    elif not isinstance(sample, tuple):
        text = (
            f"{where} must be a tensor, a tuple of positional arguments or a mapping of keyword arguments, not "
            f"{type(sample).__name__}; (x,) is the sample for a call f(x)"
        )
        raise TypeError(with_code("CC609", text))
    with torch.inference_mode(False):  # torch compiles another graph for inference tensors
        copied: Sample = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), sample)
    return copied


FORMAT = "compile_callbacks.InductorBackend"
"""The name of the format that `to_dict` writes into the data."""

VERSION = 1
"""The version of the data. Increase it with each change that an older version of this library would misread."""

_FIELDS: dict[str, type] = {
    "name": str,
    "config": Mapping,
    "verify": str,
    "on_error": str,
    "new_shapes": str,
    "device": str,
    "module": str,
    "state_dict": Mapping,
    "state_dict_metadata": Mapping,
    "samples": list,
}


def check_saved(data: object) -> Mapping[str, Any]:
    """Check that the data have the format, the version and the fields that this library writes."""
    if not isinstance(data, Mapping):
        text = f"state must be the mapping that InductorBackend.to_dict() returned, not {type(data).__name__}"
        raise TypeError(with_code("CC607", text))
    if data.get("format") != FORMAT:
        text = f"state has the format {data.get('format')!r}, and InductorBackend reads {FORMAT!r}"
        raise ValueError(with_code("CC607", text))
    if data.get("version") != VERSION:
        text = f"state has the version {data.get('version')!r}, and this library reads version {VERSION}"
        raise ValueError(with_code("CC607", text))
    for name, kind in _FIELDS.items():
        if name not in data:
            raise ValueError(with_code("CC607", f"state has no {name!r}"))
        if not isinstance(data[name], kind):
            text = f"state[{name!r}] is a {type(data[name]).__name__}, which to_dict() does not write"
            raise TypeError(with_code("CC607", text))
    return data


def saved_device(data: Mapping[str, Any]) -> torch.device:
    """Return the device that the data name."""
    try:
        return torch.device(data["device"])
    except RuntimeError as error:
        raise ValueError(with_code("CC607", f"state['device']={data['device']!r} is not a torch device")) from error


def load_weights(data: Mapping[str, Any], module: nn.Module) -> None:
    """Load the saved weights into a module."""
    if data["module"] != (name := type(module).__qualname__):
        raise ValueError(with_code("CC607", f"state is of a module of class {data['module']!r}, not of {name!r}"))
    saved = OrderedDict(data["state_dict"])
    saved._metadata = OrderedDict(data["state_dict_metadata"])  # type: ignore[attr-defined]
    found, expected = ({key: _describe(v) for key, v in of.items()} for of in (saved, module.state_dict()))
    if odd := next((key for key in expected | found if expected.get(key) != found.get(key)), None):
        text = (
            f"state['state_dict'] does not fit module: {odd!r} is {found.get(odd, 'missing')} in state, and "
            f"{expected.get(odd, 'missing')} in module"
        )
        raise ValueError(with_code("CC607", text))
    module.load_state_dict(saved)


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
