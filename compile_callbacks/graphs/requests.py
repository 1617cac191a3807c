"""`CompileRequest`: a graph that another process compiles. `RequestQueue` holds the graphs without compiled code."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from compile_callbacks import _torch
from compile_callbacks._torch.portable_graphs import NotPortableError, PortableGraph
from compile_callbacks._utils.phases import Phase
from compile_callbacks.passes.manager import PassRun, pass_options
from compile_callbacks.profiling.events import CompileKey


@dataclass(frozen=True, kw_only=True)
class CompileAnswer:
    """The compiled code of a graph, or the reason why it was not compiled.

    Attributes:
        artifact: The compiled code, as torch serializes it.
        guards: The condition on the inputs for which the code is valid.
        seconds: The duration of the compile.
        saved_bytes: The memory of the activations that the graph saves for its backward pass.
        cached: Whether the code is from torch's cache.
        pass_runs: The runs of graph passes.
        problem: The reason why the graph was not compiled, or an empty string.
    """

    artifact: bytes = b""
    guards: str | None = None
    seconds: float = 0.0
    saved_bytes: int = 0
    cached: bool = False
    pass_runs: tuple[PassRun, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class CompileRequest:
    """A graph, and the settings with which another process compiles it."""

    graph: PortableGraph
    phase: Phase
    options: Mapping[str, Any]
    passes: tuple[Any, ...]
    activation_memory_budget: float | None

    def pickled(self) -> bytes:
        """Pickle the request.

        Raises:
            NotPortableError: If a pass or an option cannot be pickled, or is a part of the script itself.
        """
        try:
            data = pickle.dumps(self)
        except Exception as error:
            raise NotPortableError(
                f"a graph pass, an option or a setting of torch cannot be pickled: {error}"
            ) from error
        if b"__main__" in data:
            raise NotPortableError("a graph pass or an option is a part of the script itself (__main__)")
        if any(graph_pass.uuid() is None for graph_pass in self.passes):
            raise NotPortableError("torch serializes no compiled code with a graph pass whose uuid() is None")
        return data

    def with_sizes(self, inputs: Sequence[Any]) -> CompileRequest:
        """Return the request for the sizes of a call."""
        return replace(self, graph=self.graph.with_sizes(inputs))

    def compile(self) -> CompileAnswer:
        """Compile the graph in this process."""
        runs: list[PassRun] = []
        saved_bytes: list[int] = []

        def add_backward(graph: Any, seconds: float) -> None:
            saved_bytes.append(_torch.inductor.saved_bytes(graph))

        started, hits = time.perf_counter(), _torch.events.cache_hits()
        with _torch.portable_graphs.restored(self.graph) as (graph_module, inputs):
            artifact, guards = _torch.inductor.compile_graph(
                graph_module,
                inputs,
                options={**self.options, **pass_options(self.passes, self.phase, runs.append)},
                activation_memory_budget=self.activation_memory_budget,
                on_backward_lowered=add_backward,
                compile_by=_torch.portable_graphs.compile_portable,
            )
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
    """A captured graph that runs eagerly until its compiled code is loaded.

    Attributes:
        key: The target, the phase and the candidate.
        request: The pickled `CompileRequest`.
        load: Loads the compiled code of an answer.
        compile_here: Lets the target compile in this process instead, for the given reason.
        runs_on_cpu: Whether compiled code of the graph runs on the CPU.
        sent_to: The process that has got the request.
    """

    key: CompileKey
    request: bytes
    load: Callable[[CompileAnswer], None]
    compile_here: Callable[[str], None]
    runs_on_cpu: bool = True
    sent_to: object = None


@dataclass(eq=False)
class RequestQueue:
    """The graphs of a session that wait for compiled code.

    Attributes:
        waiting: The graphs, in the order of their requests.
        failure: The reason why no further graph is compiled.
        takes_trials: Whether candidates of a `Tune` are compiled. Not with several ranks, which measure together.
        in_run: Whether a run is in progress. Afterwards, this process compiles the graphs that a module still calls.
    """

    waiting: list[WaitingGraph] = field(default_factory=list)
    failure: str | None = None
    takes_trials: bool = True
    in_run: bool = True

    @property
    def active(self) -> bool:
        """Whether another process compiles graphs."""
        return bool(self.waiting) and self.failure is None

    def waits(self, phase: Phase, candidate: str | None) -> bool:
        """Return whether another process will compile a graph of a variant."""
        waiting = [graph for graph in self.waiting if graph.key.phase == phase and graph.key.candidate == candidate]
        return self.active and bool(waiting)

    def end_run(self) -> None:
        """Let this process compile the graphs at their next call."""
        self.in_run = False
        for graph in [*self.waiting]:
            if graph in self.waiting:  # otherwise, another graph of its target was before it
                graph.compile_here("the run has ended")
