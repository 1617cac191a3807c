"""Checks Inductor options and modes against the installed torch, and checks config data from a file."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_choice, check_type
from compile_callbacks.passes.base import HOOK_OPTIONS, as_passes

# Inductor annotates these options as `str`, but their values are lists of names of Inductor's backends.
_BACKEND_LISTS = re.compile(r"max_autotune_(gemm|conv\w*)_backends")
_NAMES = re.compile(r"\w+(,\w+)*")


def check_mode(mode: object, argument: str = "mode", also: tuple[str | None, ...] = ()) -> None:
    """Check that a value is a mode of ``torch.compile``, or one of ``also``."""
    check_type(argument, mode, str, "the name of a mode, such as 'default'")
    hint = " `compile-callbacks modes` explains the modes and templates."
    check_choice(argument, mode, [*_torch.inductor.mode_names(), *also], hint)


def as_options(options: Any) -> Mapping[str, Any]:
    """Check Inductor options, and return them as a read-only mapping in Inductor's spelling (``"max_autotune"``)."""
    check_type("options", options, Mapping, "a mapping of option names to values")
    checked: dict[str, Any] = {}
    for given, value in options.items():
        name = _option_name(given)
        if name in checked:
            text = f"options={dict(options)!r} has {name!r} in two spellings; use one of them"
            raise ValueError(with_code("CC203", text))
        if name in HOOK_OPTIONS.values():
            if value is not None:  # torch accepts a string here, but then compiles nothing
                (value,) = as_passes((value,), f"options[{given!r}]")
        else:
            expected = _torch.inductor.settings().get_type(name)
            # Unions, literals and annotations in quotes are not checked: the compiler refuses wrong values.
            if isinstance(expected, type) and not isinstance(value, expected):
                text = f"options[{given!r}]={value!r} must be of type {expected.__name__}, not {type(value).__name__}"
                raise TypeError(with_code("CC202", text))
        checked[name] = value
    return types.MappingProxyType(checked)


def check_loaded_options(options: object) -> None:
    """Refuse values of loaded options that could run code: paths, commands and modules."""
    for given, value in options.items() if isinstance(options, Mapping) else ():
        if value is None or isinstance(value, (bool, int, float)) or _is_enumerated(str(given), value):
            continue
        text = (
            f"options[{given!r}]={value!r} is refused in loaded settings, because it may name a file, a command or a "
            "module. Loaded options are booleans, numbers and enumerated strings; your program can pass others to "
            "InductorConfig(options={...})"
        )
        raise ValueError(with_code("CC206", text))


def _option_name(given: object) -> str:
    """Return Inductor's spelling of an option's name."""
    name, known = str(given).replace("-", "_"), _torch.inductor.option_names()
    if isinstance(given, str) and name in known:
        return name
    near = [repr(match) for match in difflib.get_close_matches(name, [n for n in known if n[0].islower()])]
    hint = f"did you mean {' or '.join(near)}?" if near else "torch._inductor.list_options() lists all options"
    raise ValueError(with_code("CC201", f"options key {given!r} is unknown in torch {torch.__version__}; {hint}"))


def _is_enumerated(given: str, value: object) -> bool:
    """Return whether a value is one of an option's fixed strings. ``True`` if unknown: `as_options` refuses it."""
    name = given.replace("-", "_")
    if name not in _torch.inductor.option_names():
        return True
    if isinstance(value, str) and _BACKEND_LISTS.fullmatch(name):
        return _NAMES.fullmatch(value) is not None
    expected = _torch.inductor.settings().get_type(name)
    kinds = (expected, *typing.get_args(expected))  # a Literal, or the members of a union with one
    return any(typing.get_origin(kind) is typing.Literal and value in typing.get_args(kind) for kind in kinds)
