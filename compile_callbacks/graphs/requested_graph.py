"""`RequestedGraph`: a captured graph that runs eagerly until the code that another process compiled is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from compile_callbacks import _torch
from compile_callbacks.graphs.compiled_graph import CompiledGraph
from compile_callbacks.graphs.failures import EagerFallback
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, RequestQueue, WaitingGraph

MAX_CODES = 8
"""The maximum number of compiles of a graph with symbolic sizes, like torch's recompile limit."""


class RequestedGraph:
    """Loads the compiled code of one captured graph.

    For a graph with symbolic sizes, Dynamo's code calls this object. Inductor may compile code that is valid for some
    sizes only. In this process, it would add guards to Dynamo's guards. The guards of another process are checked here,
    and sizes without code are requested.

    Attributes:
        first: The graph, which Dynamo's code calls if all sizes are constant.
    """

    def __init__(
        self,
        request: CompileRequest,
        requests: RequestQueue,
        fallback: EagerFallback,
        new_graph: Callable[[], CompiledGraph],
        use: Callable[[CompiledGraph, Callable[..., Any]], None],
        compile_here: Callable[[str], None],
    ) -> None:
        self.first = new_graph()
        self._request = request
        self._requests = requests
        self._fallback = fallback
        self._new_graph = new_graph
        self._use = use
        self._compile_here = compile_here
        self._codes: list[tuple[Callable[[Sequence[Any]], bool], CompiledGraph]] = []
        self._waiting: WaitingGraph | None = None
        self._send(request)

    def __call__(self, *inputs: Any) -> Any:
        """Run the code that is valid for the sizes of a call, or run the graph eagerly."""
        for is_valid, graph in self._codes:
            if is_valid(inputs):
                return graph(*inputs)
        if self._codes and not self.waits:
            if len(self._codes) < MAX_CODES:
                self._send(self._request.with_sizes(inputs))
            else:
                reason = (
                    f"a graph was compiled {MAX_CODES} times, and none of its code is valid for the sizes of a call"
                )
                self._fallback.recorder.limit_reached(self._fallback.key, reason)
        assert self.first.eager is not None
        return self.first.eager(*inputs)

    @property
    def waits(self) -> bool:
        """Whether another process compiles code of this graph."""
        return self._waiting is not None and self._waiting in self._requests.waiting

    def cancel(self) -> None:
        """Load no further code."""
        self._requests.waiting = [graph for graph in self._requests.waiting if graph is not self._waiting]

    def _send(self, request: CompileRequest) -> None:
        if self._requests.in_run:
            self._waiting = WaitingGraph(
                self._fallback.key, request.pickled(), self._load, self._compile_here, request.graph.has_cpu_inputs
            )
            self._requests.waiting.append(self._waiting)

    def _load(self, answer: CompileAnswer) -> None:
        """Load compiled code, and use it from the next call on."""
        started, recorder, key = time.perf_counter(), self._fallback.recorder, self._fallback.key
        compiled = _torch.portable_graphs.load(answer.artifact, self._request.options)
        graph = self._new_graph() if self._request.graph.symbols else self.first
        self._use(graph, compiled)
        if graph is not self.first:
            self._codes.append((_torch.portable_graphs.guard_of(answer.guards), graph))
        recorder.compiles_seen += 1  # because this step takes longer
        seconds, saved_mib = time.perf_counter() - started, answer.saved_bytes / 2**20 or None
        recorder.record("compile", key, part="load", seconds=seconds, saved_mib=saved_mib, graphs=1)
        recorder.record("background", key, seconds=answer.seconds)
        recorder.record("cache", key, cache_hits=int(answer.cached), cache_misses=int(not answer.cached))
        recorder.pass_runs += [(key, run.to_dict()) for run in answer.pass_runs]
