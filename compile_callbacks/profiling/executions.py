"""`Executions`: counts the executions of compiled graphs, and the eager calls in their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Executions:
    """The executions in a session so far.

    Attributes:
        graphs: Number of executions of compiled graphs.
        eager_calls: Number of calls, parts of calls and captured graphs that ran eagerly in steps that compile.
    """

    graphs: int = 0
    eager_calls: int = 0
