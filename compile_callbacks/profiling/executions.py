"""`Executions`: counts the executions of compiled graphs, and the calls of targets that ran eagerly."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Executions:
    """What has run in a session so far.

    Attributes:
        graphs: Number of executions of compiled graphs.
        eager_calls: Number of calls of targets that ran eagerly, in a phase that this library compiles.
    """

    graphs: int = 0
    eager_calls: int = 0
