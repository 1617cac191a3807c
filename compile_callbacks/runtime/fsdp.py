"""Modules whose weights FSDP shards: their innermost parts, which are compiled, and the settings that they rule out.

FSDP2 (``fully_shard``) gathers and frees weights in forward hooks, FSDP1 (``FullyShardedDataParallel``) in the
``forward`` of a wrapper. Dynamo traces neither. So the library compiles the innermost parts, whose weights are ordinary
tensors while they run, as torchtitan compiles each transformer block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_callbacks import _torch
from compile_callbacks._torch.distributed import is_sharded as is_sharded
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig

WEIGHTS_ARE_SHARDED = "the weights are sharded: FSDP gathers them for each call, at a new address, and frees them"
"""The reason why weights are not frozen or folded, and why no CUDA graph is recorded."""


def innermost_fsdp_units(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that FSDP gathers weights for, without those that contain another one.

    Returns:
        Their dotted names in ``root``, ``""`` for ``root`` itself, and the modules.
    """
    units = {
        name: part
        for name, part in root.named_modules()
        if _torch.distributed.is_fsdp2_unit(part) or _torch.distributed.is_fsdp1_unit(part)
    }
    return [
        (strip_fsdp1_names(name), unit)
        for name, unit in units.items()
        if not any(other != name and (not name or other.startswith(f"{name}.")) for other in units)
    ]


def fsdp1_wrapped(module: nn.Module) -> nn.Module | None:
    """The module that an FSDP1 wrapper calls; ``None`` if the module is not a wrapper."""
    return module.module if _torch.distributed.is_fsdp1_unit(module) else None  # type: ignore[return-value]


def strip_fsdp1_names(name: str) -> str:
    """The dotted name of a module without the names of FSDP1 wrappers."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


def unsupported_reason(root: nn.Module, configs: Mapping[Phase, Any]) -> str | None:
    """Why sharded weights do not allow the configs, as a message; ``None`` if they do.

    A `Tune` is not checked: it skips the candidates that are not allowed.

    Args:
        root: The module.
        configs: The config of each phase.
    """
    if not is_sharded(root) or not any(configs.values()):
        return None
    if _torch.distributed.has_flat_weights(root):
        return (
            "torch.compile does not support FSDP1 with use_orig_params=False: leave the argument out of FSDPStrategy, "
            "whose default is True, or shard with FSDP2 (ModelParallelStrategy)"
        )
    for phase, config in configs.items():
        if isinstance(config, InductorConfig) and config.uses_cudagraphs:
            return (
                f"{phase}_mode={config.describe()!r} records CUDA graphs, which replay on the addresses of the "
                f"recording, and {WEIGHTS_ARE_SHARDED}. Give 'default' or 'max-autotune-no-cudagraphs'"
            )
    return None


def unsupported_strategy_reason(strategy: object) -> str | None:
    """Why nothing is compiled under a Trainer's strategy, as a message; ``None`` if the strategy is supported.

    The name of its class tells: DeepSpeed need not be installed.
    """
    if not any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return None
    return (
        "InductorCompile does not compile under DeepSpeed, whose engine wraps the module and, from ZeRO stage 3 on, "
        "gathers weights in hooks on each submodule. Shard with FSDP2 (ModelParallelStrategy), replicate with DDP, or "
        "leave the callback out"
    )


def check_not_sharded(module: nn.Module) -> None:
    """Check that this process has all weights of a module.

    Raises:
        ValueError: The weights are sharded.
    """
    if is_sharded(module):
        message = (
            "FSDP shards the weights of module, and this function takes a module with all weights in one process: "
            "load a checkpoint into a new module"
        )
        raise ValueError(with_code("CC804", message))
