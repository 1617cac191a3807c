"""`CompileEvent`: an event of a target, such as a compile, a recompile or a graph break."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from compile_callbacks._utils.phases import Phase
from compile_callbacks.profiling.comparison import Outcome


class EventKindInfo(NamedTuple):
    """How the report's list of reasons and the lines during a run show a kind of event."""

    title: str  # in the report's list of reasons
    line: str = ""  # printed during the run


EVENT_KINDS = {
    "graph_break": EventKindInfo("Graph breaks", "graph break in {target}{where}: {reason}"),
    "recompile": EventKindInfo("Recompiles", "recompiling {target}: {reason}"),
    "fallback": EventKindInfo("Fallbacks to eager", "{target} falls back to eager: {reason}"),
    "cudagraph_skip": EventKindInfo("CUDA graphs not used", "CUDA graph of {target} skipped: {reason}"),
    "without_cudagraphs": EventKindInfo("CUDA graphs given up", "{target} continues without CUDA graphs: {reason}"),
    "eager_call": EventKindInfo("Calls that ran eagerly"),
    "pass_skipped": EventKindInfo("Graph passes skipped"),
    "freezing": EventKindInfo("Weights not frozen"),
    "template": EventKindInfo("Templates that fell back"),
    "cache": EventKindInfo("Loads from torch's cache"),
    "foreground": EventKindInfo("Not compiled in the background", "{target} compiles in the foreground: {reason}"),
    "background": EventKindInfo("Compiled in the background", "the compiled code of {target} is loaded"),
    "not_requested": EventKindInfo("Not compiled", "{target} stays eager: {reason}"),
    "sent_back": EventKindInfo("Sent back to eager", "{target} runs eagerly again: {reason}"),
    "compile": EventKindInfo("Compiles"),
    "verify": EventKindInfo("Comparisons with eager"),
}
"""All kinds of events. A new kind is one entry here."""

EventKind = str
"""A key of `EVENT_KINDS`."""

WhyNot = Literal["dropout", "random numbers", "collective", "no memory", "no float64 reference", "rounding", "error"]
"""Why a graph was not compared with eager."""

Result = Literal["differs", "equal", "outputs only", "not compared"]
"""The result of comparing a graph with eager. ``"outputs only"``: outputs are equal, gradients were not compared."""

Verdict = Literal[Outcome, "too few samples", "compile time not repaid", "not compiled", "still compiling"]
"""The result of comparing the step times of a phase."""

CompilePart = Literal["graph", "backward", "cudagraph", "load"]


class CompileKey(NamedTuple):
    """The target and the phase of a compile, and the candidate if the phase has a `Tune`."""

    target: str
    phase: Phase
    candidate: str | None = None


@dataclass(kw_only=True)
class CompileEvent:
    """An event of a target, such as a compile, a recompile or a graph break.

    Attributes:
        kind: The kind of event, a key of `EVENT_KINDS`, such as ``"recompile"``.
        target: The name of the target.
        phase: The phase.
        candidate: The candidate, if the phase has a `Tune`.
        step: The number of the step in the phase, or ``None`` outside the timed steps.
        reason: The reason for the event.
        fix: Advice that avoids the event.
        file: The user's file, if torch names it.
        line: The line in the file.
        part: The compiled part, for the kind ``"compile"``: ``"graph"``, forward and backward; ``"backward"``, a
            backward graph that torch compiled later; ``"cudagraph"``, the recording of a CUDA graph; ``"load"``,
            the loading of code that the helper process compiled.
        seconds: The duration of the compile in seconds.
        saved_mib: Memory of the activations that the graphs save for backward, in MiB, or ``None`` if unknown.
        graphs: Number of compiled graphs.
        cache_hits: Number of graphs that were loaded from torch's cache, for the kind ``"cache"``.
        cache_misses: Number of graphs that were not in torch's cache.
        verdict: The result of the comparison with eager, for the kind ``"verify"``.
        why_not: Why the graph was not compared, if the verdict is ``"not compared"``. ``reason`` has the details.
        max_abs_error: Largest absolute error of an output, or ``None`` if the graph was not compared.
        tensors: Number of outputs, mutated inputs and gradients of the graph.
        noisy_tensors: How many of them were not compared, because rounding alone decides their values.
        code: The code of the message that explains a fallback, such as ``"CC301"``.
    """

    kind: EventKind
    target: str
    phase: Phase
    candidate: str | None = None
    step: int | None = None
    reason: str | None = None
    fix: str | None = None
    file: str | None = None
    line: int | None = None
    part: CompilePart | None = None
    seconds: float | None = None
    saved_mib: float | None = None
    graphs: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    verdict: Result | None = None
    why_not: WhyNot | None = None
    max_abs_error: float | None = None
    tensors: int = 0
    noisy_tensors: int = 0
    code: str | None = None

    @property
    def key(self) -> CompileKey:
        """The target, the phase and the candidate."""
        return CompileKey(self.target, self.phase, self.candidate)

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON-ready data, without the attributes that have their default."""
        return {name: value for name, value in vars(self).items() if value != getattr(CompileEvent, name, None)}
