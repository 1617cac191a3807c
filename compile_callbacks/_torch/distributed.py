"""Process groups and `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch


def ddp_treatment_is_chosen() -> bool:
    """Whether somebody chose how Dynamo treats DDP: ``True``, which stands for its splits, is torch's own default."""
    from torch._dynamo import config

    return config.optimize_ddp is not True


def outside_ddp(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, called as if outside of `DistributedDataParallel`; costs less than 1 µs a call.

    Within its forward Dynamo splits every graph, so that gradients can be reduced while the backward pass of others
    runs; also graphs that have no backward pass. It goes by this attribute of the class.
    """
    from torch.nn.parallel import DistributedDataParallel

    def call(*args: Any, **kwargs: Any) -> Any:
        active = DistributedDataParallel._active_ddp_module
        if active is None:
            return compiled(*args, **kwargs)
        DistributedDataParallel._active_ddp_module = None
        try:
            return compiled(*args, **kwargs)
        finally:
            DistributedDataParallel._active_ddp_module = active

    return call


def collective_timeouts() -> list[tuple[Any, timedelta]]:
    """The backends of this rank's process groups, each with the timeout of its collectives.

    Neither the groups of a process nor their timeouts have a public getter (torch 2.11 to 2.15). A backend without
    options, as MPI's, has no timeout and is left out.
    """
    found: dict[Any, timedelta] = {}
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        for device in getattr(group, "_device_types", ()):
            backend = group._get_backend(device)
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)
            if timeout is not None and hasattr(backend, "_set_default_timeout"):
                found[backend] = timeout
    return list(found.items())


def set_collective_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the timeout of a backend's future collectives.

    ``torch.distributed.set_timeout`` is missing in torch 2.11, and sets one timeout for all backends of a group. To be
    replaced when torch 2.15 is the oldest version and each backend can be set alone.
    """
    backend._set_default_timeout(timeout)
