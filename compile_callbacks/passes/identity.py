"""Computes the identity of a graph pass for torch's compile cache from its source, its arguments and our version."""

from __future__ import annotations

import enum
import inspect
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest, installed_version

_TORCH_AND_PYTHON = {"torch", *sys.stdlib_module_names}
_MAX_ELEMENTS = 1000  # of a tensor
_NAMED = (*_torch.graphs.OPERATOR_TYPES, torch.dtype, torch.device)


def sources_of(kind: type) -> list[str] | None:
    """Return the source files of a class and its bases, or ``None`` without a file, as for a cell of a notebook."""
    try:
        return [_source(base) for base in _own_classes(kind)]
    except (OSError, TypeError, KeyError):
        return None


def identity_of(kind: type, sources: list[str] | None, arguments: Any) -> str | None:
    """Return a hash of a class, its sources and its constructor's arguments, or ``None`` if one has no description.

    `GraphPass.uuid` lists the values that have a description.
    """
    if sources is None:
        return None
    try:
        return digest([installed_version("compile-callbacks"), sources, _class_text(kind), _text(arguments)])
    except Exception:  # the function reads files, and calls the ``uuid`` of other passes
        return None


def _text(value: Any) -> str:
    """Return a text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, enum.Enum)):
        return f"{type(value).__qualname__}:{value!r}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(map(_text, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{','.join(sorted(map(_text, value)))}]"
    if isinstance(value, Mapping):
        return f"dict[{','.join(sorted(_text(item) for item in value.items()))}]"
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_ELEMENTS:
        return f"{value.dtype}{value.device}{list(value.shape)}{value.stride()}{value.tolist()}"
    if isinstance(value, _torch.inductor.TORCH_PASS_TYPES) and (uuid := value.uuid()) is not None:  # type: ignore[attr-defined]
        return str(uuid)
    if isinstance(value, types.FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        # The positions distinguish functions of the same name, such as two lambdas in one file.
        code = [_source(value), value.__qualname__, list(value.__code__.co_positions())]
        return f"{code} {_text([captured, value.__defaults__, value.__kwdefaults__])}"
    if isinstance(value, type):
        return f"{_class_text(value)} {[_source(base) for base in _own_classes(value)]}"
    if isinstance(value, _NAMED):
        return str(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    raise TypeError(f"{value!r} has no description")


def _class_text(kind: type) -> str:
    """Return the names and the plain attributes of a class and its bases. The source contains the methods."""
    for base in kind.__mro__:
        if operator.attrgetter(base.__qualname__)(sys.modules[base.__module__]) is not base:
            raise TypeError(f"{base!r} was created by code, so its source does not describe it")
    texts = [f"{kind.__module__}.{kind.__qualname__}"]
    for base in _own_classes(kind):
        for name, value in sorted(vars(base).items()):
            if not (name.startswith(("__", "_abc_")) or callable(value) or hasattr(type(value), "__get__")):
                texts.append(f"{name}={_text(value)}")
    return " ".join(texts)


def _own_classes(kind: type) -> Iterator[type]:
    return (base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _TORCH_AND_PYTHON)


def _source(value: Any) -> str:
    """Return the source file of a class or a function, which contains the code that it calls in the same file."""
    return inspect.getsource(sys.modules[value.__module__])
