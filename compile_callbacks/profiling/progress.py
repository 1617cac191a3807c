"""`CompileProgress`: prints lines while torch compiles, and one line for each recompile with its cause."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
        self._seconds: dict[Phase, dict[str, float]] = {}  # of the longest compile of each target
        self._last: Mapping[Any, Mapping[str, Any]] = {}  # the same in the last run
        self._over = threading.Event()
        self._events: Counter[tuple[str, Phase]] = Counter()

    def state(self) -> dict[Phase, dict[str, float]]:
        """Return the seconds of the longest compile, by phase and target, in this run or else in the last run."""
        return {phase: {**self._last.get(phase, {}), **seconds} for phase, seconds in self._seconds.items()}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Use the `state` of the last run. Ignore values of a wrong type."""
        self._last = {
            phase: {target: seconds for target, seconds in of_phase.items() if isinstance(seconds, float)}
            for phase, of_phase in state.items()
        }

    def known_seconds(self, phase: Phase) -> float:
        """Return the seconds of the compiles of a phase in the last run, or 0 if unknown."""
        return float(sum(self._last.get(phase, {}).values()))

    def compile_begins(self, key: CompileKey) -> None:
        """Print a line after one second of compiling, and more lines until `compile_ends`."""
        self._over = over = threading.Event()

        def print_lines() -> None:
            what, started = f"{key.target!r} for the {key.phase} phase", time.perf_counter()
            if over.wait(FIRST_LINE_SECONDS):
                return
            last = self._last.get(key.phase, {}).get(key.target)
            self._print_line(f"compiling {what} ..." + (f" ({last:.1f} s in the last run)" if last else ""))
            while not over.wait(LINE_SECONDS):
                self._print_line(f"still compiling {what}: {time.perf_counter() - started:.0f} s")
            self._print_line(f"compiling {what} took {time.perf_counter() - started:.1f} s")  # also if it failed

        # A daemon thread, because another thread would keep an interrupted interpreter alive.
        threading.Thread(target=print_lines, name="compile-progress", daemon=True).start()

    def compile_ends(self) -> None:
        """Stop printing the lines of `compile_begins`."""
        self._over.set()

    def show(self, event: CompileEvent) -> None:
        """Print the reason for an event, unless the phase already has `MAX_LINES` lines of this kind."""
        if event.kind in ("compile", "background") and event.seconds and event.seconds >= FIRST_LINE_SECONDS:
            longest = self._seconds.setdefault(event.phase, {})
            longest[event.target] = max(round(event.seconds, 1), longest.get(event.target, 0.0))
        self._events[event.kind, event.phase] += 1
        count, form = self._events[event.kind, event.phase], EVENT_KINDS[event.kind].line
        if form and count <= MAX_LINES:
            where = f" at {Path(event.file).name}:{event.line}" if event.file else ""
            reason = short_reason(event.reason or "torch gives no reason")
            line = form.format(target=f"{event.target!r} ({event.phase})", reason=reason, where=where)
            line += f"; {event.fix}" if event.fix else ""
            further = f" (further events: report.{event.phase}.diagnostics.events)"
            self._print_line(line + further * (count == MAX_LINES))
