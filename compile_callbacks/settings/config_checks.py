"""What `InductorConfig` refuses, and what it takes a dtype's name for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.passes import HOOK_OPTIONS, pass_hook
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


def check_hook_points(passes: Sequence[Any], options: Mapping[str, Any], template: str | None) -> None:
    """Refuse passes at a hook point that the options beside them set, or those of a template: one would be lost."""
    of_template = {} if template is None else templates.get(template).options
    for graph_pass in passes:
        option = HOOK_OPTIONS[pass_hook(graph_pass)]
        given = options if option in options else of_template
        if given.get(option) is not None:
            where = f"options[{option!r}]" if given is options else f"template={template!r} with its option {option!r}"
            raise ValueError(
                f"{where} and passes={tuple(passes)!r} use the same hook point; give all of them in passes, in the "
                "order in which they are to run"
            )
