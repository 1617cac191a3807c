"""FSDP: which modules are sharded, by FSDP1 and FSDP2."""

from __future__ import annotations

import sys

import torch


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether weights of a module are gathered from shards for a call and freed after it.

    Both FSDPs mark each module that they manage for Dynamo, by this attribute (torch 2.11 to 2.15). The weights
    themselves do not tell: while a call runs they are ordinary tensors.
    """
    return any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules())


def has_flat_weights(module: torch.nn.Module) -> bool:
    """Whether FSDP1 put weights together without ``use_orig_params=True``, for which Dynamo has no support."""
    return any(
        part._is_fsdp_managed_module and not part._fsdp_use_orig_params
        for part in module.modules()
        if hasattr(part, "_fsdp_use_orig_params")
    )


def is_fsdp2_unit(module: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was called on a module: its own hooks gather and free the weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # nothing is sharded by what was not imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1_unit(module: torch.nn.Module) -> bool:
    """Whether a module is FSDP1's wrapper, whose ``module`` is what it gathers the weights for."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
