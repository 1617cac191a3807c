"""Wraps torch's signals about compiles: start, end, graph breaks and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from compile_callbacks._torch.ports import optional


@optional("compile events", lambda: ([], []))
def listeners() -> tuple[list[Any], list[Any]]:
    """Return torch's lists of the functions that it calls when a compile starts and ends. A reset clears both lists.

    torch passes on what such a function raises, so none may raise.
    """
    handler = torch._dynamo.callback.callback_handler
    return handler.start_callbacks, handler.end_callbacks


def listen(start: Callable[[Any], None], end: Callable[[Any], None], *, active: bool) -> None:
    """Add two functions to torch's lists, or remove them, unless a reset has already removed them."""
    for functions, function in zip(listeners(), (start, end), strict=True):
        if active:
            functions.append(function)
        elif function in functions:
            functions.remove(function)


class GraphBreak(NamedTuple):
    """The reason why Dynamo ended a graph, and the line of the user's code."""

    reason: str
    file: str | None
    line: int | None


@optional("compile metrics", lambda: ([], 0))
def graph_breaks(after: int) -> tuple[list[GraphBreak], int]:
    """Return the graph breaks of this process without the first ``after``, and the number of all graph breaks."""
    reasons = torch._dynamo.utils.graph_break_reasons
    after = 0 if len(reasons) < after else after  # torch._dynamo.reset() empties the list
    breaks = []
    for reason in reasons[after:]:
        where = reason.user_stack[-1] if reason.user_stack else None
        breaks.append(GraphBreak(reason.reason, where.filename if where else None, where.lineno if where else None))
    return breaks, len(reasons)


@optional("compile metrics", lambda: None)
def recompile_reason() -> str | None:
    """Return the guard that failed when torch announces a recompile, or ``None`` when it announces a first compile.

    Workaround (torch<2.13; pytorch#178351): torch announces the first compile of a backend as a recompile.
    """
    reason = torch._dynamo.utils.get_metrics_context()._metrics.get("recompile_reason")
    return reason if isinstance(reason, str) and "BACKEND_MATCH" not in reason else None


@optional("compile metrics", list)
def _compilation_metrics() -> list[Any]:
    return torch._dynamo.utils.get_compilation_metrics()


def compilation_records(seen: set[int]) -> Iterator[tuple[str, int, int, str | None]]:
    """Yield the metrics of compiles that ended since the last call, and add them to ``seen``.

    The metrics of a compile are its id, the cache hits, the cache misses, and the reason for skipping CUDA graphs.
    """
    for entry in _compilation_metrics():
        key = getattr(entry, "start_time_us", None) or id(entry)
        if key in seen or (compile_id := getattr(entry, "compile_id", None)) is None:
            continue
        seen.add(key)
        counts = [
            getattr(entry, f"{cache}_local_cache_{kind}_count", None) or 0
            for cache in ("aotautograd", "inductor_fx")
            for kind in ("hit", "miss")
        ]
        hits, misses = counts[:2] if any(counts[:2]) else counts[2:]
        yield compile_id, hits, misses, getattr(entry, "cudagraph_skip_reason", None)


@optional("compile metrics", lambda: 0)
def cache_hits() -> int:
    """Return how many graphs this process has loaded from torch's cache."""
    return int(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
