"""Hashes data, modules, code and devices, equally in every process. The hashes are keys of saved results.

These functions never raise, and call no code of the user except ``extra_repr``. They omit parts that they cannot
describe.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.device import cpu_info

_LIBRARIES = ("builtins", "abc", "typing", "torch", "lightning", "lightning_fabric", "pytorch_lightning")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def digest(data: Any) -> str:
    """Return a hash of JSON-ready data. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or ``None`` if Python imports it from a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def architecture_fingerprint(module: nn.Module) -> str:
    """Return a hash of the submodules, their classes and ``extra_repr``, and the shapes and dtypes of the weights."""
    return digest([(name, _structure(submodule)) for name, submodule in module.named_modules()])


def _structure(module: nn.Module) -> list[Any]:
    weights = [
        (kind, name, _or_none(lambda weight: str(tuple(weight.shape)), weight), str(weight.dtype))
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers))
        for name, weight in held.items()
        if weight is not None
    ]
    # A shared child is in each parent.
    children = [name for name, child in module._modules.items() if child is not None]
    # Without the name of the class's Python module, which is `__main__` in only one process.
    settings = _or_none(lambda module: _ADDRESS.sub("", module.extra_repr()), module)
    return [type(module).__qualname__, settings, children, weights]


def _or_none(describe: Callable[[Any], str], value: object) -> str | None:
    """Return the text, or ``None`` on an error: a lazy weight has no shape, and ``extra_repr`` is the user's code."""
    try:
        return describe(value)
    except Exception:
        return None


def code_fingerprint(module: nn.Module) -> str:
    """Return a hash of the source of all classes in a module, except those of torch and Lightning.

    The hash does not cover functions that the methods call. A class without a source file counts by its name.
    """
    classes = {base for submodule in module.modules() for base in type(submodule).__mro__}
    users_classes = [base for base in classes if str(base.__module__).partition(".")[0] not in _LIBRARIES]
    return digest(sorted((base.__qualname__, _or_none(inspect.getsource, base) or "") for base in users_classes))


def device_fingerprint(device: torch.device) -> str:
    """Return a hash of the properties of a device that generated code and its speed depend on."""
    if device.type == "cuda":
        versions = [torch.version.cuda, torch.version.hip]
        return digest([torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *versions])
    if device.type == "cpu":
        return digest([torch.backends.cpu.get_cpu_capability(), cpu_info("flags", "features"), torch.get_num_threads()])
    return digest([device.type])
