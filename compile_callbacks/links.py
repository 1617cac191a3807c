"""Where a warning or an error is explained: each message ends with a link to its entry in the docs."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Literal

TROUBLESHOOTING = "docs/troubleshooting.md"
"""The page that has an entry for each message; a path in the repository, as the docs have no public address yet."""

Entry = Literal[
    "a-backend-in-another-state",
    "a-graph-pass-failed",
    "a-logger-failed",
    "a-new-shape",
    "a-package-is-not-compared",
    "a-package-is-refused",
    "a-setting-is-refused",
    "a-template-falls-back",
    "an-event-file-is-damaged",
    "an-input-is-refused",
    "artifacts-are-ignored",
    "artifacts-are-not-kept",
    "compiled-already",
    "cuda-graphs-without-a-gpu",
    "differs-from-eager",
    "freezing-has-no-effect",
    "gradients-are-differentiated",
    "last-weights-in-a-package",
    "left-out-of-a-package",
    "no-compiled-graph",
    "no-package",
    "no-plot",
    "no-time-of-the-compiled-module",
    "nothing-compiles",
    "nothing-is-folded",
    "nothing-to-keep",
    "processes-do-not-meet",
    "recompile-limit",
    "repeated-blocks-differ",
    "sharded-weights",
    "slower-than-eager",
    "the-compiler-failed",
    "under-a-transform",
]
"""The entries of that page, by their anchors."""


def see(message: str, entry: Entry) -> str:
    """A message with a link to its entry; one that ends with a link keeps it, as its cause's entry says more.

    Args:
        message: What a warning or an error says.
        entry: The anchor of its entry.

    Example::

        >>> see("the template falls back", "a-template-falls-back")
        'the template falls back [see docs/troubleshooting.md#a-template-falls-back]'
    """
    linked = message.endswith("]") and f"[see {TROUBLESHOOTING}#" in message
    return message if linked else f"{message} [see {TROUBLESHOOTING}#{entry}]"


def explain(error: Exception, entry: Entry) -> None:
    """Have the message of an error that is on its way end with a link to its entry.

    Args:
        error: The error.
        entry: The anchor of its entry.
    """
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (see(error.args[0], entry),)


class Explained(contextlib.ContextDecorator):
    """Explains errors that are raised within; decorates a function, or stands in a ``with`` statement.

    Args:
        entry: The anchor of their entry.
        kinds: Their types.
    """

    def __init__(self, entry: Entry, *kinds: type[Exception]) -> None:
        self._entry = entry
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, self._kinds):
            explain(error, self._entry)


checks_settings = Explained("a-setting-is-refused", TypeError, ValueError)
"""For what refuses settings: its errors name the argument, the value and the choices, and share one entry."""
