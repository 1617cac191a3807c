"""`artifacts_key`: what compile artifacts are kept under, so that a run finds those that it can use and no others."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks.architecture import architecture_key
from compile_callbacks.passes import pass_identity
from compile_callbacks.phases import Phase
from compile_callbacks.tune import Settings


def artifacts_key(
    module: nn.Module, configs: Mapping[Phase, Settings], passes: Sequence[Any], device: torch.device
) -> str:
    """A hash of what compiled code depends on beside the code that it is compiled of: torch tells that apart itself.

    Args:
        module: The module; its weights' values do not count.
        configs: The settings by phase.
        passes: Graph passes for both phases.
        device: Where the module is.
    """
    described = {
        "architecture": architecture_key(module),
        "settings": {phase: config and config.key() for phase, config in configs.items()},
        "passes": [pass_identity(graph_pass) for graph_pass in passes],
        "packages": {name: _version(name) for name in ("compile-callbacks", "triton")},
        "torch": [torch.__version__, torch.version.git_version],
        "python": [sys.implementation.name, *sys.version_info[:2]],
        "system": _system(),
        "device": _described_device(device),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def _described_device(device: torch.device) -> list[Any]:
    # Graphs name the device by its index: those of one GPU are none of another's.
    if device.type == "cuda":
        versions = [torch.version.cuda, torch.version.hip]
        return [str(device), torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *versions]
    if device.type == "cpu":
        return ["cpu", torch.backends.cpu.get_cpu_capability(), _cpu_features(), torch.get_num_threads()]
    return [str(device)]


@functools.cache
def _cpu_features() -> str:
    """What instructions the CPU has: libraries are compiled for all of them, and would crash where one is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())


@functools.cache
def _system() -> list[Any]:
    """The operating system as far as compiled libraries depend on it."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    return [sys.platform, platform.machine(), platform.libc_ver(), release.get("ID"), release.get("VERSION_ID")]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
