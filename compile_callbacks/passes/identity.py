"""Computes the identity of a graph pass for torch's compile cache: its arguments, its source files and our version."""

from __future__ import annotations

import enum
import sys
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import digest, installed_version

_MAX_TENSOR_BYTES = 2**20  # hashing a larger tensor would take too long
_KNOWN_BY_VERSION = {"torch", "compile_callbacks", *sys.stdlib_module_names}
_STARTED = time.time()  # a file that was edited later may differ from the code that Python has loaded


class UndescribableError(Exception):
    """Raised if a value has no text that is the same in every process."""


@dataclass(frozen=True)
class DescribedCall:
    """The arguments of a call as text, and the names of the modules that define the functions and classes in it."""

    text: str
    modules: tuple[str, ...]


def describe_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> DescribedCall | None:
    """Describe the arguments of a call before they can change, or return ``None`` if one cannot be described."""
    modules: list[str] = []
    try:
        return DescribedCall(_text([args, dict(kwargs)], modules), tuple(modules))
    except (UndescribableError, RecursionError):
        return None


def identity_of_call(made: object, details: Iterable[str], call: DescribedCall) -> str | None:
    """Return a hash of an object's source files, of the call that created it, and of ``details``.

    `GraphPass.uuid` tells more. Return ``None`` if the source is unknown, or was edited after this process started.
    """
    modules = list(call.modules)
    try:
        names = [_text(base, modules) for base in type(made).__mro__]
        code = sorted(_sources(modules))
    except Exception:  # a proxy among the global values of a module can raise any error
        return None
    return digest([installed_version("compile-callbacks") or "source", *names, *details, call.text, *code])


def _sources(names: Sequence[str]) -> Iterator[str]:
    """Yield a hash of the source of each module, and of the modules whose functions and classes it uses.

    Of an installed package, yield only the version, unless it is one of the first packages.
    """
    open_, seen = list(names), set[str]()
    own_packages = {name.partition(".")[0] for name in open_}
    while open_:
        name = open_.pop()
        package = name.partition(".")[0]
        if name in seen or package in _KNOWN_BY_VERSION:
            continue
        seen.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if {"site-packages", "dist-packages"} & set(Path(file or "").parts) and package not in own_packages:
            yield f"{package} {getattr(sys.modules.get(package), '__version__', '')}"
            continue
        if file is not None and Path(file).stat().st_mtime < _STARTED:
            yield f"{name} {digest(Path(file).read_bytes().hex())}"
        elif not hasattr(module, "__path__"):  # not a namespace package, which has no file
            raise UndescribableError
        values = list(vars(module).values())
        used = [getattr(x, "__name__" if isinstance(x, types.ModuleType) else "__module__", None) for x in values]
        open_ += [other for other in used if isinstance(other, str) and other in sys.modules]


def _text(value: Any, modules: list[str]) -> str:
    """Return a text that is the same in every process. Append the modules of functions and classes to ``modules``."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}={_text(value.value, modules)}"
    if isinstance(value, _torch.inductor.TORCH_PASS_TYPES):
        uuid = value.uuid()  # type: ignore[attr-defined]
        if uuid is None:
            raise UndescribableError
        return str(uuid)
    if isinstance(value, torch.Tensor):
        return _tensor_text(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(_text(item, modules) for item in value)}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{','.join(sorted(_text(item, modules) for item in value))}]"
    if isinstance(value, Mapping):
        items = sorted(f"{_text(key, modules)}={_text(item, modules)}" for key, item in value.items())
        return f"dict[{','.join(items)}]"
    if isinstance(value, _torch.graphs.OPERATOR_TYPES):
        return str(value)
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
        modules.append(value.__module__ or "builtins")
        name = f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType):
            return f"{name} {_function_text(value, modules)}"
        if "<locals>" not in name:  # the methods of a local class can refer to values of the function around it
            return name
    raise UndescribableError


def _function_text(function: types.FunctionType, modules: list[str]) -> str:
    """Return the positions of a function in its file, its defaults, and the values of the names around it."""
    try:
        closure = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError as error:  # a cell is empty, so the function cannot be called yet
        raise UndescribableError from error
    positions = list(function.__code__.co_positions())  # a line may contain several functions
    return f"{positions}{_text([function.__defaults__, function.__kwdefaults__, closure], modules)}"


def _tensor_text(tensor: torch.Tensor) -> str:
    if tensor.numel() * tensor.element_size() > _MAX_TENSOR_BYTES or tensor.layout is not torch.strided:
        raise UndescribableError
    layout = f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.device.type}"
    if tensor.device.type == "meta":
        return layout
    content = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return layout + digest(bytes(content.tolist()).hex())
