"""Warnings that are said once each."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

from compile_callbacks.compiling.errors import CompileWarning
from compile_callbacks.links import Entry, see


class WarnOnce:
    """Warns of each subject once.

    Args:
        elsewhere: Asked first, with the subject and the message: ``True`` where another process warns of it.
    """

    def __init__(self, elsewhere: Callable[[Hashable, str], bool] = lambda subject, message: False) -> None:
        self._said: set[Hashable] = set()
        self._elsewhere = elsewhere

    def __call__(self, subject: Hashable, message: str, entry: Entry) -> bool:
        """Warn, unless that has been done for this subject.

        Args:
            subject: What the warning is about; hashable.
            message: What it says.
            entry: The anchor of its entry in the docs, for a message that does not end with a link.

        Returns:
            Whether it was said now.
        """
        if subject in self._said:
            return False
        self._said.add(subject)
        if not self._elsewhere(subject, see(message, entry)):
            warnings.warn(see(message, entry), CompileWarning, stacklevel=4)
        return True
