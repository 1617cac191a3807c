"""Calls within which nothing runs compiled."""

import contextlib
from collections.abc import Iterator


class Isolation:
    """Shared by the regions of one switch.

    Attributes:
        eager: While it holds, all of them run uncompiled.
    """

    def __init__(self) -> None:
        self.eager = False

    @contextlib.contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Nothing within runs compiled, targets inside a target neither."""
        before, self.eager = self.eager, True
        try:
            yield
        finally:
            self.eager = before
