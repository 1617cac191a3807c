"""`CompileProgress`: prints lines while torch compiles, and one line for each recompile with its cause."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.profiling.events import EVENT_KINDS, CompileEvent, CompileKey
from compile_callbacks.profiling.recompiles import short_reason

FIRST_LINE_SECONDS = 1.0
"""The time after which a compile gets its first line."""

LINE_SECONDS = 8.0
"""The time between two lines of the same compile."""

MAX_LINES = 3
"""The maximum number of lines for each kind of event and phase. `stage_ends` prints the number of further events."""


class CompileProgress:
    """Prints the target, phase and duration of each compile, and the reasons for recompiles and fallbacks."""

    def __init__(self, print_line: Callable[[str], None] = lambda line: None) -> None:
        self._seconds: dict[Phase, dict[str, float]] = {}  # the longest compile of each target, if it got a line
        self._last: dict[Phase, dict[str, float]] = {}  # the same in the last run
        self._print_line = print_line
        self._over: threading.Event | None = None
        self._events: Counter[tuple[str, Phase]] = Counter()

    def state(self) -> dict[Phase, dict[str, float]]:
        """Return the seconds of the longest compile, by phase and target, in this run or else in the last run."""
        return {phase: self._last.get(phase, {}) | seconds for phase, seconds in self._seconds.items()}

    def restore(self, state: Mapping[str, object]) -> None:
        """Use the `state` of the last run. Ignore values of a wrong type."""
        for phase in PHASES:
            of_phase = state.get(phase)
            for target, value in of_phase.items() if isinstance(of_phase, Mapping) else ():
                if isinstance(value, float):
                    self._last.setdefault(phase, {})[target] = value

    def known_seconds(self, phase: Phase) -> float:
        """Return the seconds of the compiles of a phase in the last run, or 0 if unknown."""
        return sum(self._last.get(phase, {}).values())

    def compile_begins(self, key: CompileKey) -> None:
        """Print a line after one second of compiling, and more lines until `compile_ends`."""
        self._over = threading.Event()
        # A daemon thread, because another thread would keep an interrupted interpreter alive.
        arguments = key, time.perf_counter(), self._over
        threading.Thread(target=self._print_lines, args=arguments, name="compile-progress", daemon=True).start()

    def compile_ends(self) -> None:
        """Stop printing the lines of `compile_begins`."""
        if self._over is not None:
            self._over.set()
            self._over = None

    def show(self, event: CompileEvent) -> None:
        """Print the reason for an event, unless the phase already has `MAX_LINES` lines of this kind."""
        info = EVENT_KINDS[event.kind]
        if event.kind == "background":
            self._remember(event.phase, event.target, event.seconds or 0.0)
        if not info.line:
            return
        self._events[event.kind, event.phase] += 1
        if self._events[event.kind, event.phase] <= MAX_LINES:
            where = f" at {Path(event.file).name}:{event.line}" if event.file else ""
            target = f"{event.target!r} ({event.phase})"
            reason = short_reason(event.reason or "torch gives no reason")
            line = info.line.format(target=target, reason=reason, where=where)
            self._print_line(f"{line}; {event.fix}" if event.fix else line)

    def stage_ends(self, phase: Phase) -> None:
        """Print the number of events that `show` did not print."""
        for (kind, of_phase), count in self._events.items():
            if of_phase == phase and count > MAX_LINES:
                further = f"{EVENT_KINDS[kind].name}: {count - MAX_LINES} more in the {phase} phase"
                self._print_line(f"{further}; their reasons: report.{phase}.diagnostics.events")
                self._events[kind, phase] = MAX_LINES

    def _print_lines(self, key: CompileKey, started: float, over: threading.Event) -> None:
        what = f"{key.target!r} for the {key.phase} phase"
        if over.wait(FIRST_LINE_SECONDS):
            return
        last = self._last.get(key.phase, {}).get(key.target)
        self._print_line(f"compiling {what} ..." + (f" ({last:.1f} s in the last run)" if last else ""))
        while not over.wait(LINE_SECONDS):
            self._print_line(f"still compiling {what}: {time.perf_counter() - started:.0f} s")
        seconds = time.perf_counter() - started
        self._print_line(f"compiling {what} took {seconds:.1f} s")  # also if the compiler failed
        self._remember(key.phase, key.target, seconds)

    def _remember(self, phase: Phase, target: str, seconds: float) -> None:
        of_phase = self._seconds.setdefault(phase, {})
        of_phase[target] = max(round(seconds, 1), of_phase.get(target, 0.0))
