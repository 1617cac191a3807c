"""What torch's compile cache knows a pass by: its source, its arguments and this library's version."""

from __future__ import annotations

import enum
import hashlib
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.versions import installed_version

_MOST_BYTES = 2**20  # of a tensor among the arguments; larger ones would take long to hash


class UndescribableError(Exception):
    """A value that has no text of its own."""


def digest(*parts: str) -> str:
    """A hash of texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def identity_of_call(
    sources: Iterable[Any], details: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str | None:
    """What is the same, in every process, for the same source called with the same arguments.

    Args:
        sources: Classes and functions whose source counts.
        details: Texts that count.
        args: Arguments.
        kwargs: Arguments by name.

    Returns:
        A hash; ``None`` where a source or an argument cannot be described.
    """
    try:
        return digest(_library_version(), *details, *map(_source, sources), _describe(args), _describe(dict(kwargs)))
    except UndescribableError:
        return None


def _library_version() -> str:
    return installed_version("compile-callbacks") or "source"  # run from a source tree


def _source(subject: Any) -> str:
    try:
        return f"{subject.__module__}.{subject.__qualname__}\n{inspect.getsource(subject)}"
    except (OSError, TypeError) as error:
        raise UndescribableError from error


def _describe(value: Any) -> str:
    """The same text for the same value in every process.

    Raises:
        UndescribableError: No such text is known for the value.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return f"{type(value).__name__}:{value!r}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, _torch.TORCH_PASS_TYPES):
        if (uuid := value.uuid()) is None:  # type: ignore[attr-defined]
            raise UndescribableError
        return str(uuid)
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}[{','.join(map(_describe, value))}]"
    if isinstance(value, (set, frozenset)):
        return f"set[{','.join(sorted(map(_describe, value)))}]"
    if isinstance(value, Mapping):
        return f"dict[{','.join(sorted(f'{_describe(k)}={_describe(v)}' for k, v in value.items()))}]"
    if isinstance(value, types.FunctionType):
        closed_over = [cell.cell_contents for cell in value.__closure__ or ()]
        # The source of a lambda is that of its line, which may hold two.
        code = _describe_code(value.__code__)
        return _source(value) + code + _describe([*closed_over, value.__defaults__, value.__kwdefaults__])
    if isinstance(value, _torch.OPERATOR_TYPES):
        return str(value)
    if isinstance(value, types.BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    raise UndescribableError


def _describe_code(code: types.CodeType) -> str:
    constants = [_describe_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return "|".join([code.co_code.hex(), repr(code.co_names), repr(code.co_varnames), *constants])


def _describe_tensor(tensor: torch.Tensor) -> str:
    if tensor.numel() * tensor.element_size() > _MOST_BYTES or tensor.layout is not torch.strided:
        raise UndescribableError
    layout = f"{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}{tensor.device.type}"
    if tensor.device.type == "meta":
        return layout
    bits = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return layout + hashlib.sha256(bytes(bits.tolist())).hexdigest()
