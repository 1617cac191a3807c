"""The error and the warnings that users see. Each message ends with a code that ``compile-callbacks explain`` knows."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Hashable
from pathlib import Path

_INTERNAL_PACKAGES = (
    "compile_callbacks",
    "torch",
    "lightning",
    "lightning_utilities",
    "pytorch_lightning",
    "lightning_fabric",
)


class CompileError(RuntimeError):
    """A target cannot be compiled as requested.

    Raised if the compiler fails and ``on_error="raise"``, if compiled results differ from eager and
    ``verify="raise"``, if an input has a new shape and ``new_shapes="raise"``, and if compiled gradients cannot be
    differentiated again.
    """


class CompileWarning(UserWarning):
    """A part of the module does not run compiled as requested, or a setting has no effect."""


_CODE = re.compile(r" \[CC\d*(: [^\]…]*)?[\]…]")  # an inner message may be cut off, which ends it with "…"


def with_code(code: str, message: str) -> str:
    """Append the code of a message, and the command that explains the code. Codes within the message are removed.

    Example::

        >>> with_code("CC104", "target 'net' was never called")
        "target 'net' was never called [CC104: compile-callbacks explain CC104]"
    """
    return f"{_CODE.sub('', message)} [{code}: compile-callbacks explain {code}]"


def warn_user(code: str, message: str) -> None:
    """Issue a `CompileWarning` at the user's line: the innermost caller outside this library, torch and Lightning."""
    warnings.warn(with_code(code, message), CompileWarning, stacklevel=_stack_level_of_user())


class WarnOnce:
    """Issue each warning once for each subject."""

    def __init__(self) -> None:
        self._subjects: set[Hashable] = set()

    def warn(self, code: str, message: str, *, about: Hashable = None) -> bool:
        """Warn, unless a warning with this code was issued for the same subject.

        Returns:
            Whether the warning was issued.
        """
        if (code, about) in self._subjects:
            return False
        self._subjects.add((code, about))
        warn_user(code, message)
        return True


def _stack_level_of_user() -> int:
    """Return the ``stacklevel`` at which `warnings.warn` names the line of the user's code, for this function's caller.

    That is the innermost frame whose file is in none of `_INTERNAL_PACKAGES`, or the outermost frame if all files are.
    Python 3.12 does the same with ``skip_file_prefixes``. Delete this function when Python 3.11 is no longer supported.
    """
    internal = tuple(f"{folder}/" for package in _INTERNAL_PACKAGES if (folder := _folder_of(package)))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(internal):
        level, frame = level + 1, frame.f_back
    return level


def _folder_of(package: str) -> str | None:
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    return str(Path(file).parent) if file else None
