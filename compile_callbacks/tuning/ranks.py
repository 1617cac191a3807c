"""`Ranks`: synchronizes decisions of the ranks."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

from torch import distributed

from compile_callbacks._utils.errors import warn_user

_T = TypeVar("_T")


class Ranks:
    """The process group of one run, from `join` to `leave`. In a run of one process, this class does nothing.

    Ranks synchronize only decisions that all ranks must make equally, such as the choice of a `Tune`. Failures and
    recompiles need no synchronization, because an eager rank computes the same gradients as a compiled rank.
    """

    def __init__(self) -> None:
        self.size = 1
        """The number of ranks."""
        self.is_global_zero = True
        """Whether this process writes files and issues warnings for all ranks."""
        self._group: Any = None

    def join(self, *, all_ranks: bool, synchronizes: bool) -> None:
        """Begin a run, on ``all_ranks`` or on this rank alone. Only ranks that synchronize need a process group."""
        self.leave()
        if not (all_ranks and distributed.is_available() and distributed.is_initialized()):
            self.size, self.is_global_zero = 1, True
            return
        self.size, self.is_global_zero = distributed.get_world_size(), distributed.get_rank() == 0
        if self.size > 1 and synchronizes:
            self._group = _new_group()

    def leave(self) -> None:
        """Destroy the group. Safe to call twice, and after an exception."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(AssertionError, ValueError):  # the user's code has destroyed all groups
                distributed.destroy_process_group(group)

    def gather(self, value: _T) -> list[_T]:
        """Return the values of all ranks, by rank. All ranks must call this method in the same order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self._group)
        return values


def _new_group() -> Any:
    try:
        # Gloo, because decisions are on the CPU and must not synchronize a GPU.
        return distributed.new_group(backend="gloo")
    except RuntimeError as error:  # for example, gloo finds no network interface
        message = (
            f"each rank chooses a Tune candidate for itself, because gloo failed ({type(error).__name__}: {error}). "
            "Set GLOO_SOCKET_IFNAME to a network interface that the ranks share, or set a fixed mode"
        )
        warn_user("CC803", message)
        return None
