"""How an error names a wrong argument: the argument, the value, and the choices, nearest spelling first."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence

_SHOWN = 12  # more names than this are no help in one message


def nearest_first(value: str, choices: Iterable[str]) -> list[str]:
    """The choices, those spelled most like ``value`` first."""
    names = list(choices)
    near = difflib.get_close_matches(value, names, n=3, cutoff=0.6)
    return near + [name for name in names if name not in near]


def check_choice(argument: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: It is none.
    """
    if value not in choices:
        raise ValueError(unknown(argument, value, choices))


def unknown(argument: str, value: object, choices: Iterable[str]) -> str:
    """The message for a value that is not one of the choices.

    Example::

        >>> unknown("train_mode", "defualt", ["lite", "default"])
        "train_mode='defualt' is unknown; did you mean 'default'? Choices: 'default', 'lite'."
    """
    names = nearest_first(value, choices) if isinstance(value, str) else list(choices)
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6) if isinstance(value, str) else []
    hint = f" did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(repr(name) for name in names[:_SHOWN])
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{argument}={value!r} is unknown;{hint} Choices: {listed}{more}."


@contextlib.contextmanager
def part_of(argument: str) -> Iterator[None]:
    """Have an error about a part of an argument begin with the argument's name.

    Raises:
        ValueError: One that was raised inside.
        TypeError: One that was raised inside.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        raise type(error)(f"{argument}: {error}") from error
