"""Checks of settings: Inductor options, modes and dtypes that the installed torch has, and loaded data without code."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import unknown
from compile_callbacks.passes.base import as_passes
from compile_callbacks.passes.hooks import HOOK_OPTIONS

# Inductor annotates these as `str`; they select among its own backends, and their values are names in a list.
_BACKEND_LISTS = re.compile(r"max_autotune_(gemm|conv\w*)_backends")
_NAMES = re.compile(r"\w+(,\w+)*")


def as_options(options: object) -> Mapping[str, Any]:
    """Check Inductor options, and return them read-only with Inductor's spelling (``"max_autotune"``).

    Raises:
        ValueError: The installed Inductor does not have an option, or an option is given in two spellings.
        TypeError: A value has another type than Inductor's default, or ``options`` is not a mapping.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must map option names to values, not {type(options).__name__}")
    checked: dict[str, Any] = {}
    for given, value in options.items():
        if not isinstance(given, str):
            raise TypeError(f"options has the key {given!r}, which is no option name")
        name = given.replace("-", "_")
        if name not in _torch.inductor.option_names():
            names = [n for n in sorted(_torch.inductor.option_names()) if n[0].islower()]
            raise ValueError(unknown("options key", given, names))
        if name in checked:
            raise ValueError(f"options={dict(options)!r} has {name!r} in two spellings; give one of them")
        if name in HOOK_OPTIONS.values():
            if value is not None:  # torch takes a string, and compiles nothing
                (value,) = as_passes((value,), f"options[{given!r}]")
        elif not _fits(value, expected := _torch.inductor.option_type(name)):
            raise TypeError(
                f"options[{given!r}]={value!r} must be of type {_type_name(expected)}, not {type(value).__name__}"
            )
        checked[name] = value
    return types.MappingProxyType(checked)


def _fits(value: object, expected: Any) -> bool:
    """Whether a value has an annotated type; True for annotations that cannot be checked."""
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


def check_loaded(data: Mapping[str, Any], allow_passes: Sequence[str]) -> None:
    """Refuse what loaded settings could run code with: paths, commands, modules.

    Args:
        data: The fields of an `InductorConfig`.
        allow_passes: The import paths of graph passes that the caller trusts.

    Raises:
        ValueError: A pass that is not allowed, or an option that is no boolean, number or enumerated string.
        TypeError: ``allow_passes`` is no list.
    """
    if isinstance(allow_passes, str) or not isinstance(allow_passes, Sequence):
        raise TypeError(f"allow_passes={allow_passes!r} must be a list of import paths, 'module:name'")
    options, passes = data.get("options"), data.get("passes")
    for given, value in options.items() if isinstance(options, Mapping) else ():
        if value is None or isinstance(value, (bool, int, float)) or _is_choice(str(given).replace("-", "_"), value):
            continue
        raise ValueError(
            f"options[{given!r}]={value!r} is refused in loaded settings, because it may name a file, a command or a "
            "module: they may hold booleans, numbers and enumerated strings. Your program can give it to "
            "InductorConfig(options={...})"
        )
    for index, item in enumerate(passes if isinstance(passes, (list, tuple)) else ()):
        reference = item.get("class_path") if isinstance(item, Mapping) else item
        if isinstance(reference, str) and reference not in allow_passes:
            raise ValueError(
                f"passes[{index}]={reference!r} is refused in loaded settings, because importing it runs code; if you "
                f"trust it, give allow_passes=[{reference!r}]"
            )


def _is_choice(name: str, value: object) -> bool:
    """Whether an option's value is one of a fixed set of strings; an unknown option is refused elsewhere."""
    if name not in _torch.inductor.option_names():
        return True
    expected = _torch.inductor.option_type(name)
    kinds = (expected, *typing.get_args(expected))  # Literal, or the members of Optional[Literal]
    if isinstance(value, str) and _BACKEND_LISTS.fullmatch(name):
        return _NAMES.fullmatch(value) is not None
    return any(typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind) for kind in kinds)


def check_mode(mode: object, argument: str = "mode", also: tuple[str, ...] = ()) -> None:
    """Check that a value is a mode of ``torch.compile``, one of ``also``, or ``None``."""
    if mode is None:
        return
    if not isinstance(mode, str):
        raise TypeError(f"{argument}={mode!r} must be the name of a mode, not {type(mode).__name__}")
    choices = [*_torch.inductor.mode_names(), *also]
    if mode not in choices:
        raise ValueError(unknown(argument, mode, choices))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")
