"""Wraps process groups, `DistributedDataParallel` and FSDP."""

from __future__ import annotations

import sys

import torch


def is_sharded(module: torch.nn.Module) -> bool:
    """Return whether FSDP gathers the weights of a module for each call and frees them afterwards.

    FSDP1 and FSDP2 set an attribute on each module for Dynamo (torch 2.11 to 2.15). The weights do not tell, because
    they are ordinary tensors during a call.
    """
    return any(getattr(submodule, "_is_fsdp_managed_module", False) for submodule in module.modules())


def is_fsdp_unit(module: torch.nn.Module, *names: str) -> bool:
    """Return whether FSDP gathers the weights of a module for a call, with one of these classes."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module is sharded unless this is imported
    return fsdp is not None and isinstance(module, tuple(getattr(fsdp, name) for name in names))
