"""`CompileRecorder`: records each compile with its target and phase, from torch's signals. `CompileProgress` prints."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._utils.phases import Phase
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.events import EVENT_KINDS, CompileEvent, CompileKey, CompilePart, EventKind
from compile_callbacks.profiling.recompiles import OTHER_GRAD_MODE, explain_recompile, short_reason

FIRST_LINE_SECONDS = 1.0
"""The time after which a compile gets its first line."""

LINE_SECONDS = 8.0
"""The time between two lines of the same compile."""

MAX_LINES = 3
"""The maximum number of lines for each kind of event and phase."""


class CallInProgress:
    """A running call of a compiled target, and what happened in it. The target reads this when the call ends.

    torch stands between the target and the backend, so the backend and the graphs find the call through the recorder.

    The class has no constructor, because each call makes such an object.
    """

    key: CompileKey  # the target and its phase
    args: Any = ()
    kwargs: Any = None
    missed = False  # whether none of the target's graphs fits this call; other targets then run eagerly within it
    partly_eager = False  # whether a part of the call ran eagerly

    eventful = False  # whether any attribute below differs from its default
    traced = False  # whether Dynamo traced a frame, so that frames without a graph that fits are traced, too
    failure: BaseException | None = None  # of a compiler that failed on a frame
    nothing_ran = False  # whether the failure came before any of the target's code ran
    failed_frames: tuple[Any, ...] = ()  # the code of later frames on which the compiler failed, and which ran eagerly
    compile_here: Callable[[], None] | None = None  # lets the target compile in this process instead of another one
    constant_draws: tuple[str, ...] = ()  # the functions in which torch drew random numbers only while it traced them


@dataclass(slots=True)
class Executions:
    """Counts the graphs and compiles of a session so far.

    ``compiles`` grows with each compile in this process, including the user's own, and with each load and comparison of
    a graph. A step in which it grows takes longer than usual.
    """

    step: int | None = None  # the number of the running step, which the recorder stores in events
    graphs: int = 0  # the number of executions of compiled graphs
    # The number of calls of each target that ran eagerly, in whole or in part, in steps that compile.
    eager_calls: Counter[CompileKey] = field(default_factory=Counter)
    compiles: int = 0
    resets: int = 0  # the number of calls of ``torch.compiler.reset()`` during the runs
    pass_runs: list[tuple[CompileKey, dict[str, Any]]] = field(default_factory=list)  # of custom graph passes, in order
    import_seconds: float = 0.0  # for the import of the compiler, a part of the compile time of the first phase


class _Calling(threading.local):
    """What this thread runs, because torch announces a compile in the thread that compiles."""

    current: CallInProgress | None = None  # the innermost call of a target
    compile: CompileEvent | None = None  # the running compile; attributes get their values while it runs
    began = 0.0


class CompileProgress:
    """Prints the target, phase and duration of each compile, and the reasons for recompiles and fallbacks."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._timer: threading.Timer | None = None  # prints the lines of the running compile
        self._events: Counter[tuple[str, Phase]] = Counter()

    def compile_begins(self, key: CompileKey) -> None:
        """Print a line after one second of compiling, and more lines until `compile_ends`."""
        self.compile_ends()  # of a compile whose end torch did not announce
        candidate = f" ({key.candidate})" if key.candidate else ""
        what, started = f"{key.target!r} for the {key.phase} phase{candidate}", time.perf_counter()

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
            about = f"{event.target!r} ({event.phase})"
            line = form.format(target=about, reason=short_reason(event.reason), where=where)
            line += f"; {event.fix}" if event.fix else ""
            further = f" (further events: report.{event.phase}.diagnostics.events)"
            self._print_line(line + further * (count == MAX_LINES))


class CompileRecorder:
    """Listens to torch's compile events while compiled targets run, and keeps a list of `CompileEvent` objects.

    The recorder records a compile if it starts within a call of a target. It also records later work for the
    same compile, such as the recording of a CUDA graph in the backward pass. It ignores compiles of other user code.
    """

    def __init__(self, *, print_line: Callable[[str], None], mode_arguments: Mapping[Phase, str]) -> None:
        self.mode_arguments = mode_arguments
        self._progress = CompileProgress(print_line)
        self.calling = _Calling()
        self.executions = Executions()
        self.events: list[CompileEvent] = []
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the process was asked to stop, so that no compile should begin. Must not refer to the module."""
        self.listeners = _torch.events.listeners()[0]
        """The functions that torch calls when a compile begins. ``torch.compiler.reset()`` clears this list."""
        self._listening = False
        self._keys: dict[str, CompileKey] = {}  # by torch's compile id
        self._breaks_seen = 0
        self._records_seen: set[int] = set()

    # ------------------------------------------------------------------------------------------ listening to torch

    def listen(self) -> None:
        """Start listening, or listen again after ``torch.compiler.reset()``."""
        if self not in self.listeners:
            if self._listening:
                self.executions.resets += 1
                self._keys.clear()  # because torch starts compile ids from 0 again
            _, self._breaks_seen = _torch.events.graph_breaks(0)
            for _ in _torch.events.compilation_records(self._records_seen):
                pass
            _torch.events.listen(self, self.compile_ends, active=True)
        self._listening = True

    def listen_after_reset(self) -> None:
        """Listen again if ``torch.compiler.reset()`` was called."""
        if self._listening:
            self.listen()

    def stop(self) -> None:
        """Stop listening, and remove all listeners from torch."""
        self.collect()
        self._listening = False
        _torch.events.listen(self, self.compile_ends, active=False)

    def collect(self) -> None:
        """Read torch's compilation metrics, which torch writes after it has announced the end of a compile."""
        if not self._listening:  # because compile ids belong to other code after torch.compiler.reset()
            return
        for compile_id, hits, misses, skip_reason in _torch.events.compilation_records(self._records_seen):
            if (key := self._keys.get(compile_id)) is None:
                continue
            if hits or misses:
                self.record("cache", key, cache_hits=hits, cache_misses=misses)
            if skip_reason:
                self.record("cudagraph_skip", key, reason=skip_reason)

    @_torch.ports.optional("compile events")
    def __call__(self, args: Any) -> None:
        """Store which target compiles. torch calls this object when a compile begins."""
        self.collect()
        self.executions.compiles += 1
        calling, trigger = self.calling, args.callback_trigger.name
        if calling.current is not None:
            self._keys[args.compile_id] = calling.current.key
        elif trigger == "DYNAMO":
            self._keys.pop(args.compile_id, None)  # because the id belongs to other code after torch.compiler.reset()
        calling.compile = None
        if (key := self._keys.get(args.compile_id)) is None:
            return
        if trigger == "DYNAMO" and (reason := _torch.events.recompile_reason()):
            explained, fix = explain_recompile(reason, self.mode_arguments[key.phase])
            # Validation within and outside fit compiles one graph twice, the second time from torch's cache.
            if OTHER_GRAD_MODE not in explained:
                self.record("recompile", key, reason=explained, fix=fix)
        calling.compile, calling.began = self._event("compile", key, part=_PARTS.get(trigger, "graph")), clock.now()
        self._progress.compile_begins(key)

    @_torch.ports.optional("compile events")
    def compile_ends(self, args: Any) -> None:
        """Record the compile. torch calls this method when a compile ends."""
        event, self.calling.compile = self.calling.compile, None
        breaks, self._breaks_seen = _torch.events.graph_breaks(self._breaks_seen)
        if event is None:
            return
        self._progress.compile_ends()
        event.seconds, key = clock.now() - self.calling.began, event.key
        self._add(event)
        # torch counts a graph break once for each frame that contains it, and again for each recompile.
        known = [(event.reason, event.file, event.line) for event in self.events_of(key, "graph_break")]
        for graph_break in dict.fromkeys(breaks):
            if graph_break not in known:
                self.record("graph_break", key, **graph_break._asdict())

    def limit_reached(self, key: CompileKey) -> None:
        """Record that a frame of the running call reached torch's recompile limit, with the last reason if known."""
        if all(event.code != "CC103" for event in self.events_of(key, "fallback")):
            last = next(reversed(self.events_of(key, "recompile")), None)
            reason, fix = (last.reason, last.fix) if last else ("unknown to torch", None)
            reason = f"torch's recompile limit is reached; the last reason: {reason}"
            self.record("fallback", key, reason=reason, fix=fix, code="CC103")

    # ------------------------------------------------------------------------------------------ recording

    def record(self, kind: EventKind, key: CompileKey, **attributes: Any) -> None:
        """Record an event of a target."""
        self._add(self._event(kind, key, **attributes))

    def _event(self, kind: EventKind, key: CompileKey, **attributes: Any) -> CompileEvent:
        return CompileEvent(kind=kind, step=self.executions.step, **key._asdict(), **attributes)

    def _add(self, event: CompileEvent) -> None:
        self.events.append(event)
        self.executions.compiles += event.kind in ("compile", "verify", "without_cudagraphs")
        self._progress.show(event)

    def events_of(self, key: CompileKey, kind: EventKind) -> list[CompileEvent]:
        """Return the events of a kind about a target."""
        return [event for event in self.events if event.kind == kind and event.key == key]

    def part_runs_eagerly(self) -> None:
        """Note that a part of the running call runs eagerly."""
        if (call := self.calling.current) is not None:
            call.partly_eager = True

    def count_graph(self) -> None:
        """Count a graph of the running compile. The backend of a target calls this method."""
        if (event := self.calling.compile) is not None:
            event.graphs += 1

    def add_backward(self, saved_bytes: int) -> None:
        """Add the memory that a forward graph saves for its backward graph."""
        if (event := self.calling.compile) is not None:
            event.saved_mib = (event.saved_mib or 0.0) + saved_bytes / 2**20


_PARTS: dict[str, CompilePart] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "cudagraph"}
