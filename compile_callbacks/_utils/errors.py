"""The error and the warning that users see, and a way to issue each warning once."""

from __future__ import annotations

import warnings
from collections.abc import Hashable


class CompileError(RuntimeError):
    """A target cannot be compiled as requested.

    Raised if the compiler fails and ``on_error="raise"``, if compiled results differ from eager and
    ``verify="raise"``, if an input has a new shape and ``new_shapes="raise"``, and if compiled gradients cannot be
    differentiated again.
    """


class CompileWarning(UserWarning):
    """A part of the module does not run compiled as requested, or a setting has no effect."""


class WarnOnce:
    """Issue one `CompileWarning` for each subject."""

    def __init__(self) -> None:
        self._subjects: set[Hashable] = set()

    def __call__(self, subject: Hashable, message: str) -> bool:
        """Warn, unless a warning for the subject was issued before.

        Args:
            subject: What the warning is about.
            message: The text of the warning.

        Returns:
            Whether this was the first call for the subject.
        """
        if subject in self._subjects:
            return False
        self._subjects.add(subject)
        warnings.warn(message, CompileWarning, stacklevel=4)
        return True
