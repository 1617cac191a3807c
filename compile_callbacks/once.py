"""Warnings that are said once each."""

from __future__ import annotations

import warnings

from compile_callbacks.links import Entry, see
from compile_callbacks.region import CompileWarning


class WarnOnce:
    """Warns of each subject once."""

    def __init__(self) -> None:
        self._said: set[object] = set()

    def __call__(self, subject: object, message: str, entry: Entry) -> bool:
        """Warn, unless that has been done for this subject.

        Args:
            subject: What the warning is about; hashable.
            message: What it says.
            entry: The anchor of its entry in the docs.

        Returns:
            Whether it was said now.
        """
        if subject in self._said:
            return False
        self._said.add(subject)
        warnings.warn(see(message, entry), CompileWarning, stacklevel=4)
        return True
