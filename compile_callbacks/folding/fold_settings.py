"""How graphs are folded while they compile, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compile_callbacks.folding.folded import FoldedGraph


@dataclass(frozen=True)
class FoldSettings:
    """How graphs are folded while they compile.

    Attributes:
        limit_mib: The most memory that the folded tensors of a graph may take, in MiB.
        on_folded: Told of each folded graph, also of one that torch's cache gives back.
        on_left_out: Told why a graph is compiled as it is, where folding it failed.
        on_refresh: Told when folded tensors were computed anew.
    """

    limit_mib: float
    on_folded: Callable[[FoldedGraph], None]
    on_left_out: Callable[[str], None]
    on_refresh: Callable[[], None]
