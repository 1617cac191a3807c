"""Computes the identity of a graph pass for torch's compile cache from its source, its arguments and our version."""

from __future__ import annotations

import enum
import inspect
import operator
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest, installed_version

_MAX_ELEMENTS = 1000  # of a tensor
_PLAIN: tuple[type, ...] = (
    *(bool, int, float, str, bytes, type(None), enum.Enum, torch.dtype, torch.device),
    *_torch.graphs.OPERATOR_TYPES,
)


def sources_of(kind: type) -> list[str] | None:
    """Return the source files of a class and its bases, or ``None`` without a file, as for a cell of a notebook."""
    try:
        return [_source(base) for base in _users_classes(kind)]
    except (OSError, TypeError, KeyError):
        return None


def identity_of(kind: type, sources: list[str] | None, arguments: Any) -> str | None:
    """Return a hash of a class, its sources and its constructor's arguments, or ``None`` if one has no description.

    `GraphPass.uuid` lists the values that have a description.
    """
    if sources is None:
        return None
    try:
        for base in kind.__mro__:
            if operator.attrgetter(base.__qualname__)(sys.modules[base.__module__]) is not base:
                return None  # code created the class, so its source does not describe it
        version, name = installed_version("compile-callbacks"), f"{kind.__module__}.{kind.__qualname__}"
        attributes = [_plain_attributes(base) for base in _users_classes(kind)]
        return digest([version, name, sources, _stable_repr([attributes, arguments])])
    except Exception:  # a value has no description, or a file cannot be read
        return None


def _stable_repr(value: Any) -> str:
    """Return a text that is the same in every process."""
    if isinstance(value, _PLAIN):
        return f"{type(value).__qualname__}:{value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(map(_stable_repr, value))}]"
    if isinstance(value, dict):
        return f"dict[{','.join(sorted(map(_stable_repr, value.items())))}]"
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS:
        return f"{value.dtype}{value.device}{list(value.shape)}{value.stride()}{value.tolist()}"
    if isinstance(value, types.FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        # The positions distinguish functions of the same name, such as two lambdas in one file.
        code = [_source(value), value.__qualname__, list(value.__code__.co_positions())]
        return f"{code} {_stable_repr([captured, value.__defaults__, value.__kwdefaults__])}"
    raise TypeError(f"{value!r} has no description")


def _plain_attributes(kind: type) -> dict[str, Any]:
    """Return the attributes of a class. The source contains the methods."""
    return {
        name: value
        for name, value in vars(kind).items()
        if not (name.startswith(("__", "_abc_")) or callable(value) or hasattr(type(value), "__get__"))
    }


def _users_classes(kind: type) -> Iterator[type]:
    """Yield a class and its bases, without those of torch and Python."""
    excluded = {"torch", *sys.stdlib_module_names}
    return (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in excluded)


def _source(value: Any) -> str:
    """Return the source file of a class or a function, which contains the code that it calls in the same file."""
    return inspect.getsource(sys.modules[value.__module__])
