"""`ProcessGroupSync`: synchronizes decisions of the ranks, and prevents timeouts of collectives during a compile."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed

from compile_callbacks import _torch
from compile_callbacks._utils.errors import warn_user

_T = TypeVar("_T")

LEAST_TIMEOUT = timedelta(minutes=30)
"""The shortest timeout of a collective during a run.

Ranks do not compile at the same time. The rank that waits in a collective for a compiling rank would time out, so each
rank raises its timeouts for the whole run.
"""


class ProcessGroupSync:
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
        self._timeouts: list[tuple[Any, timedelta]] = []

    def join(self, *, together: bool, decides: bool) -> None:
        """Begin a run, on all ranks ``together`` or alone. Ranks that make decisions together need a process group."""
        self.leave()
        if not (together and distributed.is_available() and distributed.is_initialized()):
            self.size, self.is_global_zero = 1, True
            return
        self.size, self.is_global_zero = distributed.get_world_size(), distributed.get_rank() == 0
        if self.size > 1:
            self._raise_timeouts()
            if decides:
                self._group = _new_group()

    def leave(self) -> None:
        """Restore the timeouts, and destroy the group. Safe to call twice, and after an exception."""
        for backend, timeout in self._timeouts:
            with contextlib.suppress(Exception):  # the user's code may have destroyed the group
                _torch.distributed.set_collective_timeout(backend, timeout)
        self._timeouts = []
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

    def _raise_timeouts(self) -> None:
        for backend, timeout in _torch.distributed.collective_timeouts():
            if timeout < LEAST_TIMEOUT:
                _torch.distributed.set_collective_timeout(backend, LEAST_TIMEOUT)
                self._timeouts.append((backend, timeout))


def _new_group() -> Any:
    try:
        # Gloo, because decisions are on the CPU and must not synchronize a GPU.
        return distributed.new_group(backend="gloo", timeout=LEAST_TIMEOUT)
    except RuntimeError as error:  # for example, gloo finds no network interface
        message = (
            f"each rank chooses a Tune candidate for itself, because gloo failed ({type(error).__name__}: {error}). "
            "Set GLOO_SOCKET_IFNAME to a network interface that the ranks share, or set a fixed mode"
        )
        warn_user("CC803", message)
        return None
