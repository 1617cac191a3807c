"""What FSDP makes of a module: the parts that it gathers the weights of one after the other, and what they rule out.

FSDP2 (``fully_shard``) gathers and frees weights in forward hooks, FSDP1 (``FullyShardedDataParallel``) in a wrapper's
``forward``. Torch traces neither. So what is compiled lies beneath them, where the weights are ordinary tensors: each
part that holds no other, as torchtitan compiles each transformer block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_callbacks import _torch
from compile_callbacks._torch.distributed import is_sharded
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig

__all__ = [
    "WEIGHTS_ARE_SHARDED",
    "check_not_sharded",
    "fsdp1_wrapped",
    "innermost_fsdp_units",
    "is_sharded",
    "strip_fsdp1_names",
    "unsupported_reason",
    "unsupported_strategy_reason",
]

WEIGHTS_ARE_SHARDED = "the weights are sharded: they are gathered for each call, at another address, and freed after it"
"""Why weights are neither baked in nor folded, and no CUDA graph is recorded."""


def innermost_fsdp_units(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that FSDP gathers weights for and that hold no other such.

    Returns:
        Their dotted names in ``root``, ``""`` for itself, and the modules.
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
    """What an FSDP1 wrapper calls; ``None`` where the module is none."""
    return module.module if _torch.distributed.is_fsdp1_unit(module) else None  # type: ignore[return-value]


def unsupported_reason(root: nn.Module, configs: Mapping[Phase, Any]) -> str | None:
    """Why settings cannot hold for a module whose weights are sharded; ``None`` where they can, or none are.

    Candidates of a `Tune` are not looked at: it leaves out what cannot hold.

    Args:
        root: The module.
        configs: The settings by phase.
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
                f"{phase}_mode={config.describe()!r} records CUDA graphs, which replay on weights that stay where they "
                f"were, and {WEIGHTS_ARE_SHARDED}. Give 'default' or 'max-autotune-no-cudagraphs'"
            )
    return None


def check_not_sharded(module: nn.Module) -> None:
    """Refuse a module of which each process holds a part.

    Raises:
        ValueError: Its weights are sharded.
    """
    if is_sharded(module):
        raise ValueError(
            "module's weights are sharded by FSDP, and this takes a module that one process holds whole: load a "
            "checkpoint into one that was built alike"
        )


def unsupported_strategy_reason(strategy: object) -> str | None:
    """Why nothing is compiled under a Trainer's strategy; ``None`` where it is one to compile under.

    It is told by the name of its class: DeepSpeed need not be installed.
    """
    if not any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return None
    return (
        "InductorCompile does not compile under DeepSpeed, whose engine wraps the module and, from ZeRO stage 3 on, "
        "gathers weights in hooks on each submodule. Shard with FSDP2 (ModelParallelStrategy), replicate with DDP, or "
        "leave the callback out"
    )


def strip_fsdp1_names(name: str) -> str:
    """A module's dotted name as it is where FSDP1 wraps nothing."""
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
