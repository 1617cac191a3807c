"""Refuses settings that sharded weights do not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.phases import Phase
from compile_callbacks.config.inductor_config import InductorConfig

WEIGHTS_ARE_SHARDED = "the weights are sharded: FSDP gathers them for each call, at a new address, and frees them"
"""The reason why sharded weights cannot be frozen, and why torch cannot record CUDA graphs."""


def unsupported_reason(root: nn.Module, configs: Mapping[Phase, Any]) -> str | None:
    """Return why sharded weights do not support the configs, or ``None`` if they do. A `Tune` skips candidates."""
    for phase, config in configs.items() if _torch.dynamo.is_sharded(root) else ():
        if isinstance(config, InductorConfig) and config.uses_cudagraphs:
            setting = f"{phase}_mode={config.describe()!r}"
            return f"{setting} records CUDA graphs, but {WEIGHTS_ARE_SHARDED}. Set 'default'"
    return None


def unsupported_strategy_reason(strategy: object) -> str | None:
    """Return the reason why the library does not support a Trainer's strategy, or ``None`` if it does."""
    # By the name of the class, because DeepSpeed may not be installed.
    if any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__):
        return "InductorCompile does not support DeepSpeed: shard with ModelParallelStrategy, or replicate with DDP"
    return None


def check_not_sharded(module: nn.Module) -> None:
    """Check that this process has all weights of a module."""
    if _torch.dynamo.is_sharded(module):
        message = "FSDP shards the weights of module: load a checkpoint into a new module, which has all weights"
        raise ValueError(with_code("CC804", message))
