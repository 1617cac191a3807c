"""`RequestedGraph`: a captured graph that runs eagerly until the code that another process compiled is loaded."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compile_callbacks import _torch
from compile_callbacks.graphs.compiled_graph import CompiledGraph
from compile_callbacks.graphs.requests import CompileAnswer, CompileRequest, RequestQueue
from compile_callbacks.graphs.target_log import TargetLog


@dataclass(eq=False, repr=False)
class RequestedGraph:
    """Loads the compiled code of one captured graph.

    For a graph with symbolic sizes, Dynamo's code calls this object. Inductor may compile code that is valid for some
    sizes only. In this process, it would add guards to Dynamo's guards. The guards of another process are checked here.
    If a call fails them, the target compiles in this process.
    """

    request: CompileRequest
    requests: RequestQueue
    log: TargetLog
    new_graph: Callable[[], CompiledGraph]
    use: Callable[[CompiledGraph, Callable[..., Any]], None]
    compile_here: Callable[[str], None]  # lets the target compile in this process instead, for the given reason
    pickled: bytes = b""  # the last request that was sent
    sent_to: object = None  # the process that has got it

    def __post_init__(self) -> None:
        self.key = self.log.key
        self.first = self.new_graph()  # Dynamo's code calls it if all sizes are constant
        self.eager = self.first.eager
        self._is_valid: Callable[[Sequence[Any]], bool] = lambda inputs: True
        if self.requests.in_run:
            self.pickled, self.sent_to = self.request.pickled(), None
            self.requests.waiting.append(self)

    def __call__(self, *inputs: Any) -> Any:
        """Run the code if it is valid for the sizes of a call, or run the graph eagerly."""
        if self.first.eager is None and self._is_valid(inputs):
            return self.first(*inputs)
        if self.first.eager is None:  # freed after the call, because other graphs of the target may still run in it
            reason = "the code of another process is not valid for the sizes of a call"
            self.log.eventful_call().compile_here = functools.partial(self.compile_here, reason)
        assert self.eager is not None
        return self.eager(*inputs)

    @property
    def waits(self) -> bool:
        """Whether another process compiles code of this graph."""
        return self in self.requests.waiting

    def cancel(self) -> None:
        """Load no further code."""
        self.requests.waiting = [graph for graph in self.requests.waiting if graph is not self]

    def load(self, answer: CompileAnswer) -> None:
        """Load compiled code, and use it from the next call on."""
        started, recorder, key = time.perf_counter(), self.log.recorder, self.key
        compiled = _torch.portable_graphs.load(answer.artifact, self.request.options)
        self.use(self.first, compiled)
        self._is_valid = _torch.portable_graphs.guard_of(answer.guards, self.request.graph.symbol_positions)
        seconds, saved_mib = time.perf_counter() - started, answer.saved_bytes / 2**20 or None
        recorder.record("compile", key, part="load", seconds=seconds, saved_mib=saved_mib, graphs=1)
        recorder.record("background", key, seconds=answer.seconds)
        recorder.record("cache", key, cache_hits=int(answer.cached), cache_misses=int(not answer.cached))
        recorder.executions.pass_runs += [(key, run) for run in answer.pass_runs]
