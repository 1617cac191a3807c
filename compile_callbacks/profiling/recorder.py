"""`CompileRecorder`: records each compile with its target and phase, from the signals that torch sends."""

from __future__ import annotations

import threading
import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._utils.phases import MODE_ARGUMENTS, Phase
from compile_callbacks.profiling import clock
from compile_callbacks.profiling.events import CompileEvent, CompileKey, CompilePart, EventKind
from compile_callbacks.profiling.progress import CompileProgress
from compile_callbacks.profiling.recompiles import OTHER_GRAD_MODE, Recompile, at_graph_break, explain_recompile


class CallInProgress:
    """A running call of a compiled target, and what happened in it. The target reads this when the call ends.

    torch stands between the target and the backend, so the backend and the graphs find the call through the recorder.

    Attributes:
        key: The target and its phase.
        args: The positional arguments.
        kwargs: The keyword arguments.
        missed: Whether none of the target's graphs fits this call. Other targets then run eagerly within it.
        compiles: Whether Dynamo traced a frame, so that frames without a graph that fits are traced, too.
        partly_eager: Whether a part of the call ran eagerly.
        code: The code of the frame that Dynamo converts.
        eventful: Whether any attribute below differs from its default.
        traced: Whether Dynamo traced a frame.
        failure: The exception of a compiler that failed on a frame.
        nothing_ran: Whether the failure came before any of the target's code ran.
        failed_frames: The code of later frames on which the compiler failed, and which ran eagerly.
        recompiles_in_next_call: Whether the compile and the eager run of its graph both ran out of memory.
        compile_here: Lets the target compile in this process instead of another one.
        runs_target_eagerly: Whether the target runs eagerly from now on.
        constant_draws: The functions in which torch drew random numbers only while it traced them.
        warnings: The warnings to issue: code, message, and what each is about.
    """

    eventful = traced = nothing_ran = recompiles_in_next_call = runs_target_eagerly = False
    compile_here: Callable[[], None] | None = None
    failure: BaseException | None = None
    failed_frames: tuple[Any, ...] = ()
    constant_draws: tuple[str, ...] = ()
    warnings: tuple[tuple[str, str, Hashable], ...] = ()

    # Without a constructor, because each call makes such an object.
    key: CompileKey
    args: Any = ()
    kwargs: Any = None
    missed = compiles = partly_eager = False
    code: types.CodeType | None = None


@dataclass(slots=True)
class Executions:
    """The executions in a session so far.

    Attributes:
        graphs: Number of executions of compiled graphs.
        eager_calls: Number of calls of each target that ran eagerly, or of which a part did, in steps that compile.
        mixed: Whether such a call in the running step belongs to a target that has compiled graphs.
    """

    graphs: int = 0
    eager_calls: Counter[CompileKey] = field(default_factory=Counter)
    mixed: bool = False


class _Calling(threading.local):
    """The innermost call of a target in this thread, because torch announces a compile in the thread that compiles."""

    current: CallInProgress | None = None
    running: tuple[CompileKey | None, float] | None = None  # the compile, and when it began
    part: CompilePart = "graph"
    graphs = saved_bytes = 0
    backward_seconds = 0.0


class CompileRecorder:
    """Listens to torch's compile events while compiled targets run, and keeps a list of `CompileEvent` objects.

    The recorder records a compile if it starts within a call of a target. It also records later work for the
    same compile, such as the recording of a CUDA graph in the backward pass. It ignores compiles of other user code.
    """

    def __init__(
        self, *, progress: CompileProgress | None = None, mode_arguments: Mapping[Phase, str] = MODE_ARGUMENTS
    ) -> None:
        self.mode_arguments = mode_arguments
        self.calling = _Calling()
        self.executions = Executions()
        self.events: list[CompileEvent] = []
        self.step: int | None = None
        """The number of the running step, which the recorder stores in events."""
        self.compiles_seen = 0
        """Number of compiles in this process, including the user's own, and of loads and comparisons of graphs. A step
        in which it grows takes longer than usual."""
        self.traces_seen = 0
        """The same without recordings of CUDA graphs."""
        self.resets = 0
        """Number of calls of ``torch.compiler.reset()`` during the runs."""
        self.pass_runs: list[tuple[CompileKey, dict[str, Any]]] = []
        """The runs of custom graph passes, in order."""
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the process was asked to stop, so that no compile should begin. Must not refer to the module."""
        self.import_seconds = 0.0
        """The time that the import of the compiler took, which belongs to the phase that compiles first."""
        self.progress = progress or CompileProgress()
        self._keys: dict[str, CompileKey] = {}  # by torch's compile id
        self._recompiles_unless_cached: dict[str, Recompile] = {}  # by torch's compile id
        self._listening = False
        self.listener = self.compile_begins  # one object, because a comparison of two bound methods takes 0.3 µs
        self.listeners = _torch.events.listeners()[0]
        """The functions that torch calls when a compile begins. ``torch.compiler.reset()`` clears this list."""
        self._breaks_seen = 0
        self._limits_reached: set[CompileKey] = set()
        self._discarded: set[CompileKey] = set()  # targets whose graphs torch.compiler.reset() discarded
        self._breaks: set[tuple[CompileKey, _torch.events.GraphBreak]] = set()
        self._records_seen: set[int] = set()

    # ------------------------------------------------------------------------------------------ listening to torch

    def listen(self) -> None:
        """Start listening. A second call checks whether ``torch.compiler.reset()`` removed the listener."""
        if self.listener in self.listeners:
            self._listening = True
            return
        if self._listening:
            self.resets += 1
            self._discarded = set(self._keys.values())
            self._keys.clear()  # because torch starts compile ids from 0 again
        self._listening = True
        _, self._breaks_seen = _torch.events.graph_breaks(0)
        for _ in _torch.events.compilation_records(self._records_seen):
            pass
        _torch.events.register(self.listener, self.compile_ends)

    def listen_after_reset(self) -> None:
        """Listen again if ``torch.compiler.reset()`` was called."""
        if self._listening and self.listener not in self.listeners:
            self.listen()

    def stop(self) -> None:
        """Stop listening, and remove all listeners from torch."""
        self.collect()
        self._listening = False
        _torch.events.unregister(self.listener, self.compile_ends)

    def collect(self) -> None:
        """Read torch's compilation metrics, which torch writes after it has announced the end of a compile."""
        if not self._listening:  # because compile ids belong to other code after torch.compiler.reset()
            return
        for compile_id, hits, misses, skip_reason in _torch.events.compilation_records(self._records_seen):
            key = self._keys.get(compile_id)
            if key is None:
                continue
            # Validation within and outside fit compiles the same graph twice. A cache hit takes almost no time.
            explained = self._recompiles_unless_cached.pop(compile_id, None)
            if explained is not None and (misses or not hits):
                self.record("recompile", key, **explained._asdict())
            if hits or misses:
                self.record("cache", key, cache_hits=hits, cache_misses=misses)
            if skip_reason:
                self.record("cudagraph_skip", key, reason=skip_reason)

    def limit_reached(self, key: CompileKey) -> None:
        """Record that a frame of the running call reached torch's recompile limit, with the last reason if known."""
        if key not in self._limits_reached:
            self._limits_reached.add(key)
            last = self._explain(key, _torch.events.last_recompile_reason())
            reason = f"torch's recompile limit is reached; the last reason: {last.reason}"
            self.record("fallback", key, reason=reason, fix=last.fix, code="CC103")

    @_torch.ports.optional("compile events")
    def compile_begins(self, args: Any) -> None:
        """Store which target compiles. torch calls this method when a compile begins."""
        self.collect()
        self.compiles_seen += 1
        by_dynamo = args.callback_trigger.name == "DYNAMO"
        key, call = None, self.calling.current
        if call is not None:
            key = self._keys[args.compile_id] = call.key
        elif by_dynamo:
            self._keys.pop(args.compile_id, None)  # because the id belongs to other code after torch.compiler.reset()
        else:
            key = self._keys.get(args.compile_id)
        self.calling.graphs, self.calling.backward_seconds, self.calling.saved_bytes = 0, 0.0, 0
        self.calling.part = _PARTS.get(args.callback_trigger.name, "graph")
        self.traces_seen += self.calling.part != "cudagraph"
        self.calling.running = key, clock.now()
        if key is None:
            return
        if by_dynamo and (reason := _torch.events.recompile_reason()):
            explained = self._explain(key, reason)
            if OTHER_GRAD_MODE in explained.reason:
                self._recompiles_unless_cached[args.compile_id] = explained
            else:
                self.record("recompile", key, **explained._asdict())
        self.progress.compile_begins(key)

    @_torch.ports.optional("compile events")
    def compile_ends(self, args: Any) -> None:
        """Record the compile. torch calls this method when a compile ends."""
        if self.calling.running is None:
            return
        key, started = self.calling.running
        self.calling.running = None
        breaks, self._breaks_seen = _torch.events.graph_breaks(self._breaks_seen)
        if key is None:
            return
        self.progress.compile_ends()
        seconds = clock.now() - started
        self.record(
            "compile",
            key,
            part=self.calling.part,
            seconds=seconds,
            backward_seconds=self.calling.backward_seconds or None,
            saved_mib=self.calling.saved_bytes / 2**20 if self.calling.backward_seconds else None,
            graphs=self.calling.graphs,
        )
        if key in self._discarded:
            self._discarded.discard(key)
            self.record("recompile", key, reason="torch.compiler.reset() discarded the compiled graphs")
        for graph_break in breaks:
            # torch counts a graph break once for each frame that contains it, and again for each recompile.
            if (key, graph_break) not in self._breaks:
                self._breaks.add((key, graph_break))
                self.record("graph_break", key, reason=graph_break.reason, file=graph_break.file, line=graph_break.line)

    # ------------------------------------------------------------------------------------------ recording

    def record(self, kind: EventKind, key: CompileKey, *, show: bool = True, **attributes: Any) -> None:
        """Record an event of a target."""
        event = CompileEvent(
            kind=kind, target=key.target, phase=key.phase, candidate=key.candidate, step=self.step, **attributes
        )
        self.events.append(event)
        if show:
            self.progress.show(event)

    def events_of(self, phase: Phase, kind: EventKind) -> list[CompileEvent]:
        """Return the events of one phase and kind."""
        return [event for event in self.events if event.phase == phase and event.kind == kind]

    def _explain(self, key: CompileKey, torchs_reason: str | None) -> Recompile:
        if not torchs_reason or torchs_reason == "Unable to find recompilation reasons":
            return Recompile("torch gives no reason")
        explained = explain_recompile(torchs_reason, self.mode_arguments[key.phase])
        call = self.calling.current
        if call is None or call.code is None or (where := _torch.frames.resumes_at(call.code)) is None:
            return explained
        breaks = [event for event in self.events_of(key.phase, "graph_break") if event.target == key.target]
        reason = next((event.reason for event in breaks if (event.file, event.line) == where), None)
        return at_graph_break(explained, *where, reason)

    def part_runs_eagerly(self) -> None:
        """Note that a part of the running call runs eagerly."""
        if (call := self.calling.current) is not None:
            call.partly_eager = True

    def count_graph(self) -> None:
        """Count a graph of the running compile. The backend of a target calls this method."""
        self.calling.graphs += 1

    def add_backward(self, saved_bytes: int, seconds: float) -> None:
        """Add the memory that a forward graph saves for its backward graph, and the time that Inductor took for it."""
        self.calling.saved_bytes += saved_bytes
        self.calling.backward_seconds += seconds


_PARTS: dict[str, CompilePart] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "cudagraph"}
