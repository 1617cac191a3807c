"""Wraps torch's signals about compiles: start, end, graph breaks and metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

callback_handler = torch._dynamo.callback.callback_handler
"""torch's list of functions to call when a compile starts and ends."""

DYNAMO_TRIGGER = torch._dynamo.callback.CallbackTrigger.DYNAMO
"""The trigger of a compile that begins with tracing, not with a backward pass or the recording of a CUDA graph."""


def unregister(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Remove two functions from torch's lists, unless ``torch._dynamo.reset()`` has already removed them."""
    for callbacks, function in ((callback_handler.start_callbacks, start), (callback_handler.end_callbacks, end)):
        if function in callbacks:
            callbacks.remove(function)


@contextlib.contextmanager
def started_compiles() -> Iterator[list[Any]]:
    """Yield a list that grows by one entry for each compile that starts in the ``with`` block."""
    started: list[Any] = []
    listener = started.append
    callback_handler.register_start_callback(listener)
    try:
        yield started
    finally:
        unregister(listener, listener)


class GraphBreak(NamedTuple):
    """The reason why Dynamo ended a graph, and the line of the user's code."""

    reason: str
    file: str | None
    line: int | None


def graph_breaks(after: int) -> tuple[list[GraphBreak], int]:
    """Return the graph breaks of this process without the first ``after``, and the number of all graph breaks."""
    reasons = torch._dynamo.utils.graph_break_reasons
    if len(reasons) < after:  # torch._dynamo.reset() has emptied the list
        after = 0
    breaks = []
    for reason in reasons[after:]:
        if reason.reason.startswith("DDPOptimizer "):
            continue  # Dynamo split the graph for DDP, which is not a graph break
        where = reason.user_stack[-1] if reason.user_stack else None
        breaks.append(GraphBreak(reason.reason, where.filename if where else None, where.lineno if where else None))
    return breaks, len(reasons)


def recompile_reason() -> str | None:
    """Return the guard that failed when torch announces a recompile, or ``None`` when it announces a first compile.

    For torch older than 2.13, the first compile of a backend for code that another backend compiled is a recompile.
    """
    reason = torch._dynamo.utils.get_metrics_context()._metrics.get("recompile_reason")
    return reason if isinstance(reason, str) and "BACKEND_MATCH" not in reason else None


def last_recompile_reason() -> str | None:
    """Return the same for the latest compile that has ended, such as one that the recompile limit ended."""
    return torch._dynamo.utils.get_compilation_metrics()[-1].recompile_reason


def compilation_records(seen: set[int]) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield the metrics of compiles that ended since the last call, and add them to ``seen``.

    The metrics of a compile are its id, the cache hits, the cache misses, and the reason for skipping CUDA graphs.
    """
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
        yield entry.compile_id, hits, misses, entry.cudagraph_skip_reason


def cache_hits() -> int:
    """Return how many graphs this process has loaded from torch's cache."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
