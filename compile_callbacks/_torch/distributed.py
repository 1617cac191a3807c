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


def has_flat_weights(module: torch.nn.Module) -> bool:
    """Return whether FSDP1 flattened weights without ``use_orig_params=True``, which Dynamo does not support."""
    return any(
        submodule._is_fsdp_managed_module and not submodule._fsdp_use_orig_params
        for submodule in module.modules()
        if hasattr(submodule, "_fsdp_use_orig_params")
    )


def is_fsdp2_unit(module: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on a module, whose hooks then gather and free the weights."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module is sharded unless this is imported
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_fsdp1_unit(module: torch.nn.Module) -> bool:
    """Return whether a module is FSDP1's wrapper, which gathers the weights of its ``module``."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)
