"""`Executions`: counts how often compiled code ran, and how often a target ran eagerly instead."""

from __future__ import annotations


class Executions:
    """Counts the executions of a session. Each compiled graph adds 1 in each of its calls.

    Attributes:
        graphs: The executions of compiled graphs.
        eager_calls: The calls of a compiled target, or of one of its graphs, that ran eagerly.
    """

    __slots__ = ("eager_calls", "graphs")

    def __init__(self) -> None:
        self.graphs = 0
        self.eager_calls = 0
