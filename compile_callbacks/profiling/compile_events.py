"""What torch compiled, when, for which target and phase: gathered from torch's own signals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from compile_callbacks import _torch
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.profiling.recompiles import explain_recompile

EventKind = Literal[
    "compile",
    "cache",
    "graph_break",
    "recompile",
    "fallback",
    "cudagraph_skip",
    "verify",
    "fold",
    "pass_skipped",
    "template",
]

Verdict = Literal["equal", "outputs only", "differs", "not compared"]
"""The result of comparing a graph with eager. ``"outputs only"``: they are equal, gradients were not compared."""

CompilePart = Literal["graph", "backward", "cudagraph"]


class CompileKey(NamedTuple):
    """The target and phase that a compile is for, whether weights are baked in, and the candidate of a tuned phase."""

    target: str
    phase: Phase
    frozen: bool = False
    candidate: str | None = None


@dataclass(frozen=True, kw_only=True)
class CompileEvent:
    """One thing that happened while compiling.

    Attributes:
        kind: What happened.
        part: What was compiled (kind ``"compile"``): ``"graph"``, forward and backward; ``"backward"``, a backward
            that torch put off; ``"cudagraph"``, a recording.
        target: Name of the target.
        phase: The phase it was compiled for.
        candidate: The candidate of a `Tune` that it happened to, in a line; ``None`` where nothing is tuned.
        seconds: How long it took (kind ``"compile"``).
        backward_seconds: How much of it went into the backward graph.
        graphs: How many graphs were compiled (kind ``"compile"``).
        verdict: The result of comparing a graph with eager (kind ``"verify"``).
        max_abs_error: Largest absolute error of its outputs; ``None`` if it was not compared.
        folded_mib: Memory that folded weights take, in MiB (kind ``"fold"``; ``None`` where nothing is folded).
        cache_hits: Graphs that came from torch's cache (kind ``"cache"``).
        cache_misses: And those that did not.
        reason: Torch's reason.
        file: The user's file, where torch names one.
        line: The line in it.
    """

    kind: EventKind
    target: str
    phase: Phase
    part: CompilePart | None = None
    candidate: str | None = None
    seconds: float | None = None
    backward_seconds: float | None = None
    graphs: int = 0
    verdict: Verdict | None = None
    max_abs_error: float | None = None
    folded_mib: float | None = None
    cache_hits: int = 0
    cache_misses: int = 0
    reason: str | None = None
    file: str | None = None
    line: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The event as JSON-ready data, without what it has no value for."""
        return {name: value for name, value in asdict(self).items() if value not in (None, 0)}


def _nothing() -> None:
    pass


class TargetCall(NamedTuple):
    """A call of a compiled target.

    Attributes:
        key: The target and its phase.
        on_trace: Called when Dynamo begins to trace in the call.
        nested_calls_eager: Whether targets that are called within this one run eagerly.
    """

    key: CompileKey
    on_trace: Callable[[], None]
    nested_calls_eager: bool = False


class _Calling(threading.local):
    """The innermost call of a target that a thread is in: compiles announce themselves in the thread that compiles."""

    current: TargetCall | None = None


class CompileRecorder:
    """Listens while compiled targets run, and keeps a list of `CompileEvent`.

    A compile is ours where one of our targets is being called (``key``), or where it goes on with one that
    was (a CUDA graph that is recorded in backward). Compiles of the user's other code are not recorded.

    Args:
        clock: Seconds, rising.
        on_start: Called with the key when a compile of ours begins.
        on_end: Called when it ends.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        on_start: Callable[[CompileKey], None] = lambda key: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.calling = _Calling()
        self.events: list[CompileEvent] = []
        self.compiles_seen = 0
        """Compiles in this process so far, the user's own too: a step in which this changes is no sample."""
        self.traces_seen = 0
        """Those of them that are not recordings of a CUDA graph."""
        self.recompile_limits: dict[CompileKey, str] = {}
        """Targets and phases that torch compiles for no further inputs, and what it compiled anew for last."""
        self.pass_runs: list[tuple[CompileKey, dict[str, Any]]] = []
        """What each custom graph pass did to each graph, in order."""
        self.weight_refreshes: dict[Phase, int] = dict.fromkeys(PHASES, 0)
        """Times that folded weights were computed anew."""
        self.with_graph_breaks: set[CompileKey] = set()
        """Targets and phases that have a graph break."""
        self.on_reset: Callable[[], None] = _nothing
        """Called after ``torch.compiler.reset()`` has removed all listeners, and this one listens again."""
        self._clock = clock
        self._on_start = on_start
        self._on_end = on_end
        self._backward_seconds = 0.0
        self._keys: dict[str, CompileKey] = {}
        self._running: tuple[CompileKey | None, float] | None = None
        self._listening = False
        self._graphs = 0
        self._part: CompilePart = "graph"
        self._breaks_seen = 0
        self._reset_since: set[CompileKey] = set()  # whose graphs torch.compiler.reset() discarded
        self._breaks: set[tuple[CompileKey, _torch.events.GraphBreak]] = set()
        self._records_seen: set[int] = set()

    @property
    def key(self) -> CompileKey | None:
        """The target and phase that this thread is calling; ``None`` outside of our calls."""
        call = self.calling.current
        return None if call is None else call.key

    def listen(self) -> None:
        """Begin to hear of compiles; called again, it notices if ``torch.compiler.reset()`` ended that."""
        if self._start in _torch.events.callback_handler.start_callbacks:
            self._listening = True
            return
        if self._listening:
            self._reset_since = {key for key in self._keys.values() if key is not None}
            self._keys.clear()  # compile ids begin again
        self._listening = True
        _, self._breaks_seen = _torch.events.graph_breaks(0)
        for _ in _torch.events.compilation_records(self._records_seen):
            pass
        _torch.events.callback_handler.register_start_callback(self._start)
        _torch.events.callback_handler.register_end_callback(self._end)

    def listen_after_reset(self) -> None:
        """Continue to hear of compiles after ``torch.compiler.reset()`` within a step; takes 0.2 µs."""
        if self._listening and self._start not in _torch.events.callback_handler.start_callbacks:
            self.listen()
            self.on_reset()

    def stop(self) -> None:
        """Hear no more, and leave nothing behind in torch."""
        self.collect()
        self._listening = False
        _torch.events.unregister(self._start, self._end)

    def count_graph(self) -> None:
        """Called by a target's backend for each graph that it is given."""
        self._graphs += 1

    def add_lowering_time(self, seconds: float, *, is_backward: bool) -> None:
        """Called when Inductor has compiled the forward or the backward half of a graph."""
        if is_backward:
            self._backward_seconds += seconds

    def record_pass(self, key: CompileKey, run: dict[str, Any]) -> None:
        """Called for each custom graph pass that ran on a graph."""
        self.pass_runs.append((key, run))

    def count_weight_refresh(self, key: CompileKey) -> None:
        """Called when folded weights were computed anew."""
        self.weight_refreshes[key.phase] += 1

    def record(self, kind: EventKind, key: CompileKey, **what: Any) -> CompileEvent:
        """Record something that happened to a target."""
        event = CompileEvent(kind=kind, target=key.target, phase=key.phase, candidate=key.candidate, **what)
        self.events.append(event)
        return event

    def events_of(self, phase: Phase, kind: EventKind) -> list[CompileEvent]:
        """The events of one kind and phase so far."""
        return [event for event in self.events if event.phase == phase and event.kind == kind]

    def collect(self) -> None:
        """Read what torch has written down since the last call: it does so after a compile's end is announced."""
        if not self._listening:  # what compiles now is not ours, and after torch._dynamo.reset() ids begin anew
            return
        for record in _torch.events.compilation_records(self._records_seen):
            key = self._keys.get(record.compile_id)
            if key is None:
                self._look_for_limit(record)
                continue
            if record.cache_hits or record.cache_misses:
                self.record("cache", key, cache_hits=record.cache_hits, cache_misses=record.cache_misses)
            if record.recompile_reason:
                self.record("recompile", key, reason=explain_recompile(record.recompile_reason))
            if record.cudagraph_skip_reason:
                self.record("cudagraph_skip", key, reason=record.cudagraph_skip_reason)

    def _look_for_limit(self, record: _torch.events.CompilationRecord) -> None:
        """Torch gives up on a frame at its recompile limit without announcing a compile."""
        if not record.hit_recompile_limit:
            return
        frame = _torch.events.frame_of(record.compile_id)
        key = next((key for known, key in self._keys.items() if _torch.events.frame_of(known) == frame), None)
        if key is not None and key not in self.recompile_limits:
            last = explain_recompile(record.recompile_reason) if record.recompile_reason else "torch gives no reason"
            self.recompile_limits[key] = last
            self.record("fallback", key, reason=f"torch's recompile limit is reached; the last reason: {last}")

    def _start(self, args: Any) -> None:
        self.collect()
        self.compiles_seen += 1
        key = self.key
        if key is not None:
            self._keys[args.compile_id] = key
        elif args.callback_trigger is _torch.events.DYNAMO_TRIGGER:
            self._keys.pop(args.compile_id, None)  # after torch._dynamo.reset() ids begin anew
        else:
            key = self._keys.get(args.compile_id)
        self._graphs, self._backward_seconds = 0, 0.0
        self._part = _PARTS.get(args.callback_trigger.name, "graph")
        self.traces_seen += self._part != "cudagraph"
        self._running = key, self._clock()
        if key is not None:
            if self._part == "graph" and self.calling.current is not None:
                self.calling.current.on_trace()
            self._on_start(key)

    def _end(self, args: Any) -> None:
        if self._running is None:
            return
        key, started = self._running
        self._running = None
        breaks, self._breaks_seen = _torch.events.graph_breaks(self._breaks_seen)
        if key is None:
            return
        self._on_end()
        self.record(
            "compile",
            key,
            part=self._part,
            seconds=self._clock() - started,
            backward_seconds=self._backward_seconds or None,
            graphs=self._graphs,
        )
        if key in self._reset_since:
            self._reset_since.discard(key)
            self.record("recompile", key, reason="torch.compiler.reset() discarded the compiled graphs")
        for found in breaks:
            self.with_graph_breaks.add(key)
            # One place breaks the graph of each frame that is traced through it, and again when recompiled.
            if (key, found) in self._breaks:
                continue
            self._breaks.add((key, found))
            self.record("graph_break", key, reason=found.reason, file=found.file, line=found.line)


_PARTS: dict[str, CompilePart] = {"LAZY_BACKWARD": "backward", "CUDAGRAPH_RECORDING": "cudagraph"}
