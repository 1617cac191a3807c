"""`artifacts_key`: what compile artifacts are kept under, so that a run finds those that it can use and no others."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_callbacks.architecture import architecture_key
from compile_callbacks.devices.device_description import described_device
from compile_callbacks.passes import pass_identity
from compile_callbacks.phases import Phase
from compile_callbacks.settings.tune import Settings
from compile_callbacks.versions import installed_version


def artifacts_key(
    module: nn.Module,
    configs: Mapping[Phase, Settings],
    passes: Sequence[Any],
    targets: Sequence[str],
    device: torch.device,
) -> str:
    """A hash of what compiled code depends on beside the code that it is compiled of: torch tells that apart itself.

    Args:
        module: The module; its weights' values do not count.
        configs: The settings by phase.
        passes: Graph passes for both phases.
        targets: Names of what is compiled of it: other targets are other graphs.
        device: Where the module is.
    """
    described = {
        "architecture": architecture_key(module),
        "settings": {phase: config and config.key() for phase, config in configs.items()},
        "passes": [pass_identity(graph_pass) for graph_pass in passes],
        "targets": list(targets),
        "packages": {name: installed_version(name) for name in ("compile-callbacks", "triton")},
        "torch": [torch.__version__, torch.version.git_version],
        "python": [sys.implementation.name, *sys.version_info[:2]],
        "system": _system(),
        "device": described_device(device),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _system() -> list[Any]:
    """The operating system as far as compiled libraries depend on it."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return [sys.platform, platform.machine(), platform.libc_ver(), release.get("ID"), release.get("VERSION_ID")]
