"""Writes the texts of errors: a wrong argument with similar names, and the root cause of a failure in one line."""

from __future__ import annotations

import dataclasses
import difflib
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from compile_callbacks._utils.errors import with_code

_MAX_CHOICES = 20  # more than the modes and templates; a longer list does not help the reader


def check_choice(argument: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    """Check that a value is one of the choices. ``hint`` ends the message about another value."""
    if value not in choices:
        raise ValueError(with_code("CC201", unknown(argument, value, choices) + hint))


def check_type(argument: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Check that a value has one of the types. A boolean is not a number. ``expected`` completes "must be ..."."""
    accepts_bool = bool in kinds if isinstance(kinds, tuple) else kinds is bool
    if not isinstance(value, kinds) or (isinstance(value, bool) and not accepts_bool):
        message = f"{argument}={value!r} must be {expected}, not {type(value).__name__}"
        raise TypeError(with_code("CC202", message))


def unknown(argument: str, value: object, choices: Iterable[str]) -> str:
    """Return the message for a value that is not one of the choices, with similar names and a few of the choices."""
    names = list(choices)
    near = difflib.get_close_matches(value, names) if isinstance(value, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else "."
    names = [*near, *(name for name in names if name not in near)]
    more = ", ..." if len(names) > _MAX_CHOICES else ""
    return f"{argument}={value!r} is unknown{hint} Choices: {', '.join(map(repr, names[:_MAX_CHOICES]))}{more}."


def check_fields(argument: str, data: Any, dataclass: type) -> None:
    """Check that the keys of an argument are names of a dataclass's fields."""
    check_type(argument, data, Mapping, f"a mapping of {dataclass.__name__}'s fields")
    for name in data:
        check_choice(f"{argument}: field", name, [field.name for field in dataclasses.fields(dataclass)])


def error_chain(error: BaseException) -> list[BaseException]:
    """Return an error of torch, and the errors that it wraps. The last one is the root cause."""
    chain = [error]
    while isinstance(cause := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__, BaseException):
        if cause in chain:  # a ring
            break
        chain.append(cause)
    return chain


def describe_failure(error: BaseException) -> str:
    """Return the type and message of the root cause of an error, or the error that a failed process printed."""
    error = error_chain(error)[-1]
    if not isinstance(error, subprocess.CalledProcessError):
        return f"{type(error).__name__}: {error}".strip()
    # torch's message only contains the long command line.
    command = error.cmd.split() if isinstance(error.cmd, str) else error.cmd
    texts = [x.decode(errors="replace") if isinstance(x, bytes) else x or "" for x in (error.stdout, error.stderr)]
    output = "\n".join(text.strip() for text in texts if text.strip())
    output = next((line for line in output.splitlines() if "error" in line.lower()), output) or "it printed nothing"
    return f"{Path(str(command[0])).name} ended with exit status {error.returncode}: {output}"


def in_one_line(text: str, width: int = 200) -> str:
    """Replace line breaks by spaces and cut the text after ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
