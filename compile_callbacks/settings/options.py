"""Inductor options as users give them: names and values that the installed torch takes."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.passes import HOOK_OPTIONS, as_passes


def as_options(options: object) -> Mapping[str, Any]:
    """Options by the names that Inductor has for them, read-only; torch takes ``"max-autotune"`` for another spelling.

    Raises:
        ValueError: An option that the installed Inductor does not have, or two spellings of one.
        TypeError: A value of another type than Inductor's own, or no mapping of names.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"options={options!r} must map option names to values, not {type(options).__name__}")
    checked: dict[str, Any] = {}
    for given, value in options.items():
        if not isinstance(given, str):
            raise TypeError(f"options has the key {given!r}, which is no option name")
        name = given.replace("-", "_")
        if name not in _torch.option_names():
            names = [n for n in sorted(_torch.option_names()) if n[0].islower()]
            raise ValueError(unknown("options key", given, names))
        if name in checked:
            raise ValueError(f"options={dict(options)!r} has {name!r} in two spellings; give one of them")
        if name in HOOK_OPTIONS.values():
            as_passes((value,) if value is not None else (), f"options[{given!r}]")
        elif not _fits(value, expected := _torch.option_type(name)):
            raise TypeError(
                f"options[{given!r}]={value!r} must be of type {_type_name(expected)}, not {type(value).__name__}"
            )
        checked[name] = value
    return types.MappingProxyType(checked)


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
