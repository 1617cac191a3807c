"""Writes the texts of errors: a wrong argument with similar names, and the root cause of a failure in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import inspect
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from compile_callbacks._utils.errors import with_code

_P = ParamSpec("_P")
_R = TypeVar("_R")

_MAX_CHOICES = 20  # more than the modes and templates; a longer list does not help the reader


def check_choice(argument: str, value: object, choices: Sequence[str | None], hint: str = "") -> None:
    """Check that a value is one of the choices. ``hint`` ends the message about another value."""
    if value not in choices:
        raise ValueError(with_code("CC201", unknown(argument, value, choices) + hint))


def check_type(argument: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Check that a value has one of the types. A boolean is not a number. ``expected`` completes "must be ..."."""
    accepts_bool = bool in kinds if isinstance(kinds, tuple) else kinds is bool
    if not isinstance(value, kinds) or (isinstance(value, bool) and not accepts_bool):
        message = f"{argument}={value!r} must be {expected}, not {type(value).__name__}"
        raise TypeError(with_code("CC202", message))


def unknown(argument: str, value: object, choices: Iterable[str | None]) -> str:
    """Return the message for a value that is not one of the choices, with similar names and a few of the choices.

    Example::

        >>> unknown("train_mode", "defualt", ["lite", "default"])
        "train_mode='defualt' is unknown; did you mean 'default'? Choices: 'default', 'lite'."
    """
    names = list(choices)
    near = difflib.get_close_matches(value, filter(None, names)) if isinstance(value, str) else []
    if near and len(names) > _MAX_CHOICES:
        return f"{argument}={value!r} is unknown; did you mean {' or '.join(map(repr, near))}?"
    hint = f"; did you mean {near[0]!r}?" if near else "."
    names = [*near, *(name for name in names if name not in near)]
    more = f", and {len(names) - _MAX_CHOICES} more" if len(names) > _MAX_CHOICES else ""
    return f"{argument}={value!r} is unknown{hint} Choices: {', '.join(map(repr, names[:_MAX_CHOICES]))}{more}."


def check_fields(data: Any, dataclass: type, hint: str = "") -> None:
    """Check that data map names of a dataclass's fields to values. ``hint`` ends the message about another name."""
    check_type("data", data, Mapping, f"a mapping of {dataclass.__name__}'s fields")
    known = [field.name for field in dataclasses.fields(dataclass)]
    for name in data:
        if name not in known:
            raise ValueError(with_code("CC201", unknown("field", name, known) + hint))


def explain_unknown_arguments(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function refuse an unknown keyword with a hint: similar names, or what an argument of torch becomes."""
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    called = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        for name, value in kwargs.items():
            if name not in names:
                near = difflib.get_close_matches(name, names)
                hint = f"Did you mean {near[0]!r}?" if near else f"Arguments: {', '.join(names)}"
                if "train_mode" in names and name in _OF_TORCH:
                    hint = _OF_TORCH[name].format(called=called, name=name, value=value)
                raise TypeError(with_code("CC201", f"{called} has no argument {name!r}. {hint}"))
        return function(*args, **kwargs)

    return checked


_OF_TORCH = {
    **dict.fromkeys(
        ("dynamic", "fullgraph", "options", "template", "freezing"),
        "{name!r} is a setting of a phase: {called}(train_mode={{{name!r}: {value!r}}})",
    ),
    "mode": "Each phase has its own mode: {called}(train_mode={value!r}, infer_mode={value!r})",
    "backend": "The backend is always Inductor. Set the modes: {called}(train_mode=..., infer_mode=...)",
}
"""The hint for each argument of ``torch.compile``, and of a phase, where each phase has its own settings."""


@contextlib.contextmanager
def part_of(argument: str) -> Iterator[None]:
    """Prefix each ``ValueError`` and ``TypeError`` of a ``with`` block with the name of the argument."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from error


def root_cause(error: BaseException) -> BaseException:
    """Return the error that an error of torch wraps."""
    seen: set[int] = set()  # because a chain of causes can be circular
    while id(error) not in seen:
        seen.add(id(error))
        cause = getattr(error, "inner_exception", None) or error.__cause__
        error = cause if isinstance(cause, BaseException) else error
    return error


def describe_failure(error: BaseException) -> str:
    """Return the type and message of the root cause of an error, or the error that a process printed before it failed.

    torch's message about a process only contains the long command line.
    """
    error = root_cause(error)
    if not isinstance(error, subprocess.CalledProcessError):
        return f"{type(error).__name__}: {error}".strip()
    command = error.cmd.split() if isinstance(error.cmd, str) else error.cmd
    ended = f"ended with exit status {error.returncode}"
    if error.returncode < 0:
        ended = f"was ended by {signal.Signals(-error.returncode).name}"
    texts = [x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr)]
    output = "\n".join(text.strip() for text in texts if text.strip())
    output = next((line for line in output.splitlines() if "error" in line.lower()), output) or "it printed nothing"
    return f"{Path(str(command[0])).name} {ended}: {output}"


def in_one_line(text: str, width: int = 200) -> str:
    """Replace line breaks by spaces and cut the text after ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
