"""The settings of torch that change the compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import attention

FLAGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn": (
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        lambda values: torch.backends.cudnn.set_flags(
            _benchmark=values[0], _deterministic=values[1], _allow_tf32=values[2]
        ),
    ),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, torch.backends.mkldnn.set_flags),
    "attention": (
        lambda: [int(kernel) for kernel in attention._cur_sdpa_kernel_backends(with_priority=True)],
        lambda kernels: attention._sdpa_kernel([attention.SDPBackend(kernel) for kernel in kernels], set_priority=True),
    ),
}
"""How to get and to set each setting that is not in a config."""


def configs() -> dict[str, Any]:
    """Return the configs of Inductor and AOTAutograd by name."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    return {"inductor": inductor_config, "functorch": functorch_config}


def changed(config: Any) -> dict[str, Any]:
    """Return the settings of a config that differ from their defaults."""
    return {name: value for name, value in config.get_config_copy().items() if not config._is_default(name)}
