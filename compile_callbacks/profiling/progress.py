"""A line while something compiles, so that the first step is not minutes of silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from compile_callbacks.profiling.compile_events import CompileKey

FIRST_LINE_SECONDS = 1.0
"""A compile that takes less is over before anybody wonders."""

LINE_SECONDS = 8.0
"""Time between two lines of the same compile; silence of more than 10 s looks like a hang."""


class CompileProgress:
    """Says what is compiling, for which phase and for how long, from a thread of its own.

    Args:
        print_line: Takes a line of text.
        clock: Seconds, rising.
    """

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._print_line = print_line
        self._clock = clock
        self._over: threading.Event | None = None

    def compile_begins(self, key: CompileKey) -> None:
        """A compile begins; lines follow until `compile_ends`."""
        self._over = threading.Event()
        # A daemon: an interpreter that is told to stop while compiling does not wait for it.
        threading.Thread(
            target=self._lines, args=(key, self._clock(), self._over), name="compile-progress", daemon=True
        ).start()

    def compile_ends(self) -> None:
        """The compile is over, or was given up."""
        if self._over is not None:
            self._over.set()
            self._over = None

    def _lines(self, key: CompileKey, started: float, over: threading.Event) -> None:
        what = f"{key.target!r} for the {key.phase} phase"
        if over.wait(FIRST_LINE_SECONDS):
            return
        self._print_line(f"compiling {what} ...")
        while not over.wait(LINE_SECONDS):
            self._print_line(f"still compiling {what}: {self._clock() - started:.0f} s")
        self._print_line(f"compiled {what} in {self._clock() - started:.1f} s")
