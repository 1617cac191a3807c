"""`CompileRequest`: a graph that another process compiles. `RequestQueue` holds the graphs without compiled code."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._torch.portable_graphs import NotPortableError, PortableGraph
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.manager import with_passes
from compile_callbacks.profiling.events import CompileKey


@dataclass(frozen=True, kw_only=True)
class CompileAnswer:
    """The compiled code of a graph, or the reason why it was not compiled."""

    artifact: bytes = b""  # the compiled code, as torch serializes it
    guards: str | None = None  # the condition on the inputs for which the code is valid
    seconds: float = 0.0  # the duration of the compile
    saved_bytes: int = 0  # the memory of the activations that the graph saves for its backward pass
    cached: bool = False  # whether the code is from torch's cache
    pass_runs: tuple[dict[str, Any], ...] = ()
    problem: str = ""  # why the graph was not compiled


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A graph, and the settings with which another process compiles it."""

    graph: PortableGraph
    phase: Phase
    passes: tuple[Any, ...]
    arguments: Mapping[str, Any]  # of `_torch.inductor.compile_graph`

    def pickled(self) -> bytes:
        """Pickle the request, or raise a `NotPortableError`."""
        try:
            data = pickle.dumps(self)
        except Exception as error:
            reason = f"a graph pass, an option or a setting of torch cannot be pickled: {error}"
            raise NotPortableError(reason) from error
        if b"__main__" in data:
            raise NotPortableError("a graph pass or an option is a part of the script itself (__main__)")
        if any(graph_pass.uuid() is None for graph_pass in self.passes):
            raise NotPortableError("torch serializes no compiled code with a graph pass whose uuid() is None")
        return data

    def compile(self) -> CompileAnswer:
        """Compile the graph in this process."""
        runs: list[dict[str, Any]] = []
        saved_bytes: list[int] = []
        options = with_passes(self.arguments["options"], self.passes, self.phase, runs.append)
        started, hits = time.perf_counter(), _torch.events.cache_hits()
        with _torch.portable_graphs.restored(self.graph) as (graph_module, inputs):
            compiled = _torch.inductor.compile_graph(
                graph_module,
                inputs,
                **{**self.arguments, "options": options},
                on_backward_lowered=saved_bytes.append,
            )
            artifact, guards = _torch.portable_graphs.serialized(compiled, inputs)
        return CompileAnswer(
            artifact=artifact,
            guards=guards,
            seconds=time.perf_counter() - started,
            saved_bytes=sum(saved_bytes),
            cached=_torch.events.cache_hits() > hits,
            pass_runs=tuple(runs),
        )


@dataclass(eq=False)
class WaitingGraph:
    """A captured graph that runs eagerly until the code that another process compiles is loaded."""

    key: CompileKey
    pickled: bytes  # its `CompileRequest`
    load: Callable[[CompileAnswer], None]  # uses the code from the next call on
    compile_here: Callable[[str], None]  # lets the target compile in this process instead, for the given reason
    backend: object  # of its target
    sent_to: object = None  # the process that has got the request


@dataclass(eq=False)
class RequestQueue:
    """The graphs of a session that wait for compiled code."""

    waiting: list[WaitingGraph] = field(default_factory=list)  # in the order of their requests
    failure: str | None = None  # why no further graph is compiled
    takes_trials: bool = True  # whether candidates of a `Tune` are compiled; not with ranks, which measure together
    in_run: bool = False  # whether a run with a helper process is in progress

    @property
    def active(self) -> bool:
        """Whether another process compiles graphs."""
        return bool(self.waiting) and self.failure is None

    def waits(self, phase: Phase, candidate: str | None) -> bool:
        """Return whether another process will compile a graph of a variant."""
        return self.active and any(
            (graph.key.phase, graph.key.candidate) == (phase, candidate) for graph in self.waiting
        )

    def end_run(self) -> None:
        """Let this process compile the graphs at their next call."""
        self.in_run = False
        while self.waiting:
            self.waiting[0].compile_here("the run has ended")  # cancels all graphs of the target
