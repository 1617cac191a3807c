"""torch's reports of its compiles: start and end, graph breaks and metrics."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

callback_handler = torch._dynamo.callback.callback_handler
"""torch's list of functions to call when a compile starts and ends."""

DYNAMO_TRIGGER = torch._dynamo.callback.CallbackTrigger.DYNAMO
"""The trigger of a compile that begins with tracing, not with a backward pass or a CUDA-graph recording."""


class TraceSettings:
    """Sets global settings while a compile of this library is traced, and not for other compiles.

    They are set when torch announces a compile, because setting them around each call would take 10 µs a call.

    - ``torch._inductor.config.freezing``: while tracing, Dynamo decides by the global setting alone whether weights
      become constants; ``options={"freezing": True}`` does not reach it.
    - A warning is ignored: Dynamo reads ``.grad`` of each input, and torch warns if the input is the output of another
      target. The warning is about code that is not the user's.

    Workaround (torch<2.12): two settings are switched off. With ``skip_tensor_guards_with_matching_dict_tags``, torch
    skips the guards on the weights of a module if the dictionary of the weights is unchanged. It does not notice a new
    ``requires_grad``, a new dtype that came through ``.data``, and an input that is a buffer which the call changes.
    With ``use_recursive_dict_tags_for_guards`` it does not notice the first parameter of a module. The cost of all
    guards is in docs/reference/limits.md.

    Args:
        ours: Tells whether the compile that begins is one of this library.
        frozen: Tells whether it freezes the weights.
    """

    def __init__(self, *, ours: Callable[[], bool], frozen: Callable[[], bool]) -> None:
        self._ours = ours
        self._frozen = frozen
        self._settings = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to watch for compiles."""
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    def remove(self) -> None:
        """Stop watching."""
        unregister(self._start, self._end)

    def _start(self, args: Any) -> None:
        from torch._inductor import config

        if not self._ours():
            return
        self._settings.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
        if self._frozen():  # `WeightWatch` checks frozen weights
            self._settings.enter_context(config.patch(freezing=True))
        elif torch.__version__.startswith("2.11."):
            shortcuts = "skip_tensor_guards_with_matching_dict_tags", "use_recursive_dict_tags_for_guards"
            self._settings.enter_context(torch._dynamo.config.patch(dict.fromkeys(shortcuts, False)))

    def _end(self, args: Any) -> None:
        self._settings.close()


def unregister(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Remove two functions from torch's lists; ``torch._dynamo.reset()`` may have done so already."""
    for callbacks, function in ((callback_handler.start_callbacks, start), (callback_handler.end_callbacks, end)):
        if function in callbacks:
            callbacks.remove(function)


class GraphBreak(NamedTuple):
    """Why, and at which line of the user's code, Dynamo ended a graph."""

    reason: str
    file: str | None
    line: int | None


def graph_breaks(after: int) -> tuple[list[GraphBreak], int]:
    """The graph breaks of this process after the first ``after`` ones, and the number of all graph breaks."""
    reasons = torch._dynamo.utils.graph_break_reasons
    if len(reasons) < after:  # torch._dynamo.reset() has emptied the list
        after = 0
    found = []
    for reason in reasons[after:]:
        if reason.reason.startswith("DDPOptimizer "):
            continue  # a graph that is split for DDP: no Python code runs between the parts
        where = reason.user_stack[-1] if reason.user_stack else None
        found.append(GraphBreak(reason.reason, where.filename if where else None, where.lineno if where else None))
    return found, len(reasons)


class CompilationRecord(NamedTuple):
    """torch's compilation metrics of one compiled frame."""

    compile_id: str
    is_forward: bool
    recompile_reason: str | None
    hit_recompile_limit: bool
    cache_hits: int
    cache_misses: int
    cudagraph_skip_reason: str | None


def frame_of(compile_id: str) -> str:
    """The part of a compile's id that all compiles of one frame share: "3" of "3/1"."""
    return compile_id.partition("/")[0]


def recompile_reason() -> str | None:
    """Return the guard that failed, while torch announces the start of a recompile; ``None`` for a first compile."""
    reason = torch._dynamo.utils.get_metrics_context()._metrics.get("recompile_reason")
    return reason if isinstance(reason, str) else None


def compilation_records(seen: set[int]) -> Iterator[CompilationRecord]:
    """The metrics of compiles that ended since the last call; ``seen`` remembers them."""
    for entry in torch._dynamo.utils.get_compilation_metrics():
        key = entry.start_time_us or id(entry)
        if key in seen or entry.compile_id is None:
            continue
        seen.add(key)
        hits = entry.aotautograd_local_cache_hit_count or 0
        misses = entry.aotautograd_local_cache_miss_count or 0
        if not hits and not misses:
            hits = entry.inductor_fx_local_cache_hit_count or 0
            misses = entry.inductor_fx_local_cache_miss_count or 0
        yield CompilationRecord(
            entry.compile_id,
            entry.is_forward is not False,
            entry.recompile_reason,
            "recompile limit exceeded" in (entry.fail_reason or ""),
            hits,
            misses,
            entry.cudagraph_skip_reason,
        )
