"""Checks ``InductorConfig(dynamo={...})``, and maps each kind of graph break to the setting that may remove it."""

from __future__ import annotations

import logging
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from compile_callbacks._utils.messages import check_choice, check_type

SWITCHES = (
    "allow_rnn",
    "allow_unspec_int_on_nn_module",
    "capture_dynamic_output_shape_ops",
    "capture_scalar_outputs",
    "trace_autograd_ops",
)
"""The settings that are ``True`` or ``False``."""

FUNCTION_LISTS = ("ignore_logging_functions", "reorderable_logging_functions")
"""The settings that list names of `FUNCTIONS`."""

_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "print": (print,),
    "warnings.warn": (warnings.warn,),
    **{f"logging.{name}": (getattr(logging, name), getattr(logging.Logger, name)) for name in _LEVELS},
}
"""The functions that a setting can list. ``"logging.info"`` is also the method ``info`` of each logger."""


def as_dynamo_settings(settings: Any) -> Mapping[str, Any]:
    """Check settings of Dynamo, and return them as a read-only mapping with sorted tuples of function names."""
    check_type("dynamo", settings, Mapping, "a mapping of setting names to values")
    checked: dict[str, Any] = {}
    for name, value in sorted(settings.items(), key=str):
        check_choice("dynamo key", name, [*SWITCHES, *FUNCTION_LISTS])
        argument = f"dynamo[{name!r}]"
        if name in SWITCHES:
            check_type(argument, value, bool, "True or False")
            checked[name] = value
            continue
        check_type(argument, value, (list, tuple, set, frozenset), "a list of function names")
        for function in value:
            check_choice(argument, function, list(FUNCTIONS))
        checked[name] = tuple(sorted(set(value)))
    return types.MappingProxyType(checked)


def torchs_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for ``torch._dynamo.config``, with functions instead of their names."""
    return {
        name: value if name in SWITCHES else {function for each in value for function in FUNCTIONS[each]}
        for name, value in settings.items()
    }
