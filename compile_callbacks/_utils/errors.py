"""Defines the error and the warning of this library. Messages end with a code for ``compile-callbacks explain``."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable

_INTERNAL_PACKAGES = "compile_callbacks", "torch", "lightning", "lightning_utilities"


class CompileError(RuntimeError):
    """Raised if a target cannot run compiled as requested.

    The reasons are: the compiler fails and ``on_error="raise"``; compiled results differ from eager and
    ``verify="raise"``; or compiled gradients cannot be differentiated again.
    """


class CompileWarning(UserWarning):
    """Issued if a part of the module does not run compiled as requested, or if a setting has no effect."""


_CODE = re.compile(r" \[CC\d*(: [^\]…]*)?[\]…]")  # "…" ends an inner message that was cut off


def with_code(code: str, message: str) -> str:
    """Append a code to a message, and the command that explains the code. Remove other codes from the message."""
    return f"{_CODE.sub('', message)} [{code}: compile-callbacks explain {code}]"


def warn_user(code: str, message: str) -> None:
    """Issue a `CompileWarning` at the user's line: the innermost caller outside this library, torch and Lightning."""
    warnings.warn(with_code(code, message), CompileWarning, stacklevel=_stack_level_of_user())


class WarnOnce:
    """Issues each warning once for each ``about`` value."""

    def __init__(self) -> None:
        self._subjects: set[Hashable] = set()

    def warn(self, code: str, message: str, *, about: Hashable = None) -> bool:
        """Warn, unless this object has warned with the same code and ``about``. Return whether it warned now."""
        if (code, about) in self._subjects:
            return False
        self._subjects.add((code, about))
        warn_user(code, message)
        return True


def _stack_level_of_user() -> int:
    """Return the ``stacklevel`` of the innermost frame outside `_INTERNAL_PACKAGES`, or of the outermost frame."""
    # Replace this function by ``skip_file_prefixes`` of Python 3.12 when Python 3.11 is no longer supported.
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL_PACKAGES:
        level, frame = level + 1, frame.f_back
    return level
