"""What `InductorConfig` refuses, and what it takes a dtype's name for."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.passes import HOOK_OPTIONS, as_passes
from compile_callbacks.settings import templates

_AUTOCAST_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def as_autocast_dtype(value: object) -> torch.dtype | None:
    """The dtype that autocast is to compute in, from it or its name."""
    if value is None:
        return None
    if isinstance(value, str):
        if value not in _AUTOCAST_DTYPES:
            raise ValueError(unknown("autocast_dtype", value, list(_AUTOCAST_DTYPES)))
        return _AUTOCAST_DTYPES[value]
    if not isinstance(value, torch.dtype):
        raise TypeError(f"autocast_dtype={value!r} must be a torch.dtype or its name, not {type(value).__name__}")
    if value not in _AUTOCAST_DTYPES.values():
        raise ValueError(f"autocast_dtype={value} must be torch.bfloat16 or torch.float16: autocast computes in those")
    return value


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def check_mode(mode: object, argument: str = "mode", also: tuple[str, ...] = ()) -> None:
    """Refuse what is no mode of ``torch.compile``, nor one of ``also``."""
    if mode is None:
        return
    if not isinstance(mode, str):
        raise TypeError(f"{argument}={mode!r} must be the name of a mode, not {type(mode).__name__}")
    choices = [*_torch.mode_names(), *also]
    if mode not in choices:
        raise ValueError(unknown(argument, mode, choices))


def check_template(template: object) -> None:
    """Refuse what is no template's name."""
    if template is None:
        return
    if not isinstance(template, str):
        raise TypeError(f"template={template!r} must be the name of a template, not {type(template).__name__}")
    templates.get(template)


def check_options(options: object) -> None:
    """Refuse options that the installed Inductor does not have, and values of other types than its own."""
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must map option names to values, not {type(options).__name__}")
    for name, value in options.items():
        if not isinstance(name, str):
            raise TypeError(f"options has the key {name!r}, which is no option name")
        if name.replace("-", "_") not in _torch.option_names():
            raise ValueError(unknown("options key", name, [n for n in sorted(_torch.option_names()) if n[0].islower()]))
        if name in HOOK_OPTIONS.values():
            as_passes((value,) if value is not None else (), f"options[{name!r}]")
        elif not _fits(value, expected := _torch.option_type(name.replace("-", "_"))):
            raise TypeError(
                f"options[{name!r}]={value!r} must be of type {_type_name(expected)}, not {type(value).__name__}"
            )


def _fits(value: object, expected: Any) -> bool:
    """Whether a value is of an annotated type; an annotation that cannot be judged admits everything."""
    origin = typing.get_origin(expected)
    if origin is typing.Literal:
        return value in typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(expected))
    if origin is not None:
        return _fits(value, origin)
    if expected is Callable or not isinstance(expected, type):
        return True
    if isinstance(value, bool) and expected is not bool:  # bool is an int to isinstance, and no number to a user
        return expected is object
    return isinstance(value, expected)


def _type_name(expected: Any) -> str:
    return expected.__name__ if isinstance(expected, type) else str(expected)
