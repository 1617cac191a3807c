"""`CompileProgress`: prints lines while torch compiles, and one line for each recompile with its cause."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from compile_callbacks._utils.phases import Phase
from compile_callbacks.profiling.events import EVENT_KINDS, CompileEvent, CompileKey
from compile_callbacks.profiling.recompiles import short_reason

FIRST_LINE_SECONDS = 1.0
"""The time after which a compile gets its first line."""

LINE_SECONDS = 8.0
"""The time between two lines of the same compile."""

MAX_LINES = 3
"""The maximum number of lines for each kind of event and phase."""


class CompileProgress:
    """Prints the target, phase and duration of each compile, and the reasons for recompiles and fallbacks."""

    def __init__(self, print_line: Callable[[str], None] = lambda line: None) -> None:
        self._print_line = print_line
        self._timer: threading.Timer | None = None  # prints the lines of the running compile
        self._events: Counter[tuple[str, Phase]] = Counter()

    def compile_begins(self, key: CompileKey) -> None:
        """Print a line after one second of compiling, and more lines until `compile_ends`."""
        what, started = f"{key.target!r} for the {key.phase} phase", time.perf_counter()

        def print_lines() -> None:
            self._print_line(f"compiling {what} ...")
            while not timer.finished.wait(LINE_SECONDS):
                self._print_line(f"still compiling {what}: {time.perf_counter() - started:.0f} s")
            self._print_line(f"compiling {what} took {time.perf_counter() - started:.1f} s")  # also if it failed

        timer = self._timer = threading.Timer(FIRST_LINE_SECONDS, print_lines)
        timer.daemon = True  # because another thread would keep an interrupted interpreter alive
        timer.start()

    def compile_ends(self) -> None:
        """Stop printing the lines of `compile_begins`."""
        if self._timer is not None:
            self._timer.cancel()

    def show(self, event: CompileEvent) -> None:
        """Print the reason for an event, unless the phase already has `MAX_LINES` lines of this kind."""
        self._events[event.kind, event.phase] += 1
        count, form = self._events[event.kind, event.phase], EVENT_KINDS[event.kind].line
        if form and count <= MAX_LINES:
            where = f" at {Path(event.file).name}:{event.line}" if event.file else ""
            reason = short_reason(event.reason or "torch gives no reason")
            line = form.format(target=f"{event.target!r} ({event.phase})", reason=reason, where=where)
            line += f"; {event.fix}" if event.fix else ""
            further = f" (further events: report.{event.phase}.diagnostics.events)"
            self._print_line(line + further * (count == MAX_LINES))
