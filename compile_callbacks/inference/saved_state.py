"""Reads the data that `InductorBackend.to_dict` returns: checks the format, and loads the weights into a module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.errors import with_code

FORMAT = "compile_callbacks.InductorBackend"
"""The name of the format, in the data."""

VERSION = 1
"""The version of the data. A change that an older version of this library would misread increases it."""

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
    """Check that data have the format, the version and the fields that this library writes.

    Raises:
        TypeError: The data or a field has another type.
        ValueError: The format or the version is another one, or a field is missing.
    """
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
    """Return the device that the data name.

    Raises:
        ValueError: It is not a device of torch.
    """
    try:
        return torch.device(data["device"])
    except RuntimeError as error:
        raise ValueError(with_code("CC607", f"state['device']={data['device']!r} is not a torch device")) from error


def load_weights(data: Mapping[str, Any], module: nn.Module) -> None:
    """Load the saved weights into a module.

    Raises:
        ValueError: The module has another class, or weights of other names, shapes or dtypes; it is then unchanged.
    """
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
