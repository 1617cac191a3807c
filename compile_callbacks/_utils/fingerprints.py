"""Fingerprints of data, modules, code and devices: hashes that are equal in every process.

A fingerprint never calls more of the user's code than ``extra_repr``, never raises, and is bounded in time. What cannot
be described is left out.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import re
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_callbacks._utils.device import cpu_info

_KNOWN_BY_VERSION = ("builtins", "abc", "typing", "torch", "lightning", "lightning_fabric", "pytorch_lightning")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MAX_WRAPPERS = 32  # decorators around one function


def digest(data: Any) -> str:
    """Return a hash of JSON-ready data; the order of keys does not count.

    Example::

        >>> digest({"mode": "default", "dynamic": None}) == digest({"dynamic": None, "mode": "default"})
        True
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or ``None`` if it is not installed.

    A package that is imported from a source tree is not installed either.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def architecture_fingerprint(module: nn.Module) -> str:
    """Return a hash of a module's structure: submodules, their classes and settings, shapes and dtypes of weights.

    The settings are what ``extra_repr`` prints. Values and devices of weights do not count, nor do the shapes that a
    lazy module does not know yet.
    """
    return digest(
        [
            (
                name,
                # Not the module's name: the class of a script is in `__main__` in one process only.
                type(part).__qualname__,
                _settings(part),
                [child for child, found in part._modules.items() if found is not None],  # shared ones appear in both
                [(kind, weight, *_shape_and_dtype(tensor)) for kind, weight, tensor in _own_weights(part)],
            )
            for name, part in module.named_modules()
        ]
    )


def _settings(part: nn.Module) -> str | None:
    try:
        return _ADDRESS.sub("", part.extra_repr())
    except Exception:  # the user's code
        return None


def _own_weights(part: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for kind, weights in (("parameter", part._parameters), ("buffer", part._buffers)):
        yield from ((kind, name, tensor) for name, tensor in weights.items() if tensor is not None)


def _shape_and_dtype(tensor: torch.Tensor) -> list[str | None]:
    try:
        return [None if is_lazy(tensor) else str(tuple(tensor.shape)), str(tensor.dtype)]
    except Exception:  # a nested tensor has no shape
        return []


def code_fingerprint(module: nn.Module) -> str:
    """Return a hash of the methods of all classes in a module, without those of torch and Lightning.

    Equal in every process with the same Python version. Functions that the methods call do not count.
    """
    classes = {known for part in module.modules() for known in type(part).__mro__}
    own = [known for known in classes if str(known.__module__).partition(".")[0] not in _KNOWN_BY_VERSION]
    return digest(
        sorted(
            (known.__qualname__, str(name), _described(code))
            for known in own
            for name, member in vars(known).items()
            for code in _code_of(member)
        )
    )


def _code_of(member: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function and of each function that it wraps.

    Attributes are read only from known types and from instance dictionaries: an object like ``MagicMock`` has every
    attribute, each holds another such object, and its ``__class__`` is what the test wants.
    """
    try:
        for _ in range(_MAX_WRAPPERS):
            kind = type(member)
            if issubclass(kind, types.FunctionType):
                yield member.__code__
            if issubclass(kind, property):
                member = member.fget
            elif issubclass(kind, (staticmethod, classmethod)):
                member = member.__func__
            elif issubclass(kind, (functools.cached_property, functools.partial, functools.partialmethod)):
                member = member.func
            else:
                member = vars(member).get("__wrapped__")
    except Exception:  # no instance dictionary, or the user's own
        return


def _described(value: object) -> str:
    """Describe a code object or a constant of it; the order of a set of strings differs from process to process."""
    if isinstance(value, types.CodeType):
        return f"{value.co_code.hex()} {value.co_names} {list(map(_described, value.co_consts))}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_described, value))}"
    if isinstance(value, tuple):
        return f"tuple {list(map(_described, value))}"
    return _ADDRESS.sub("", repr(value))


def device_fingerprint(device: torch.device) -> str:
    """Return a hash of the properties of a device that generated code and its speed depend on.

    GPUs of the same model have the same fingerprint.
    """
    if device.type == "cuda":
        versions = [torch.version.cuda, torch.version.hip]
        return digest([torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *versions])
    if device.type == "cpu":
        return digest([torch.backends.cpu.get_cpu_capability(), cpu_info("flags", "features"), torch.get_num_threads()])
    return digest([device.type])
