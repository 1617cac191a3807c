"""`RequestedGraph`: a captured graph that runs eagerly until the code that another process compiled is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compile_callbacks import _torch
from compile_callbacks.graphs.compiled_graph import CompiledGraph
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, RequestQueue

MAX_CODES = 8
"""The maximum number of compiles of a graph with symbolic sizes, like torch's recompile limit."""


@dataclass(eq=False, repr=False)
class RequestedGraph:
    """Loads the compiled code of one captured graph.

    For a graph with symbolic sizes, Dynamo's code calls this object. Inductor may compile code that is valid for some
    sizes only. In this process, it would add guards to Dynamo's guards. The guards of another process are checked here,
    and sizes without code are requested.
    """

    request: CompileRequest
    requests: RequestQueue
    fallback: EagerFallback
    new_graph: Callable[[], CompiledGraph]
    use: Callable[[CompiledGraph, Callable[..., Any]], None]
    compile_here: Callable[[str], None]  # lets the target compile in this process instead, for the given reason
    pickled: bytes = b""  # the last request that was sent
    sent_to: object = None  # the process that has got it

    def __post_init__(self) -> None:
        self.key = self.fallback.key
        self.first = self.new_graph()  # Dynamo's code calls it if all sizes are constant
        self._codes: list[tuple[Callable[[Sequence[Any]], bool], CompiledGraph]] = []
        self._send(self.request)

    def __call__(self, *inputs: Any) -> Any:
        """Run the code that is valid for the sizes of a call, or run the graph eagerly."""
        for is_valid, graph in self._codes:
            if is_valid(inputs):
                return graph(*inputs)
        if self._codes and not self.waits:
            if len(self._codes) < MAX_CODES:
                self._send(replace(self.request, graph=self.request.graph.with_sizes(inputs)))
            else:
                reason = (
                    f"a graph was compiled {MAX_CODES} times, and none of its code is valid for the sizes of a call"
                )
                self.fallback.recorder.limit_reached(self.key, reason)
        assert self.first.eager is not None
        return self.first.eager(*inputs)

    @property
    def waits(self) -> bool:
        """Whether another process compiles code of this graph."""
        return self in self.requests.waiting

    def cancel(self) -> None:
        """Load no further code."""
        self.requests.waiting = [graph for graph in self.requests.waiting if graph is not self]

    def _send(self, request: CompileRequest) -> None:
        if self.requests.in_run:
            self.pickled, self.sent_to = request.pickled(), None
            self.requests.waiting.append(self)

    def load(self, answer: CompileAnswer) -> None:
        """Load compiled code, and use it from the next call on."""
        started, recorder, key = time.perf_counter(), self.fallback.recorder, self.key
        compiled = _torch.portable_graphs.load(answer.artifact, self.request.options)
        graph = self.new_graph() if self.request.graph.symbols else self.first
        self.use(graph, compiled)
        if graph is not self.first:
            self._codes.append((_torch.portable_graphs.guard_of(answer.guards), graph))
        recorder.compiles_seen += 1  # because this step takes longer
        seconds, saved_mib = time.perf_counter() - started, answer.saved_bytes / 2**20 or None
        recorder.record("compile", key, part="load", seconds=seconds, saved_mib=saved_mib, graphs=1)
        recorder.record("background", key, seconds=answer.seconds)
        recorder.record("cache", key, cache_hits=int(answer.cached), cache_misses=int(not answer.cached))
        recorder.pass_runs += [(key, run.to_dict()) for run in answer.pass_runs]
