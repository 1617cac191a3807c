"""`Executions`: counts the executions of compiled graphs, and what ran eagerly instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Executions:
    """What has run in a session so far.

    Attributes:
        graphs: Number of executions of compiled graphs.
        eager_calls: Number of calls, parts of calls and captured graphs that ran eagerly in steps that compile.
    """

    graphs: int = 0
    eager_calls: int = 0
