"""What a device is: which other one may run code that was compiled for it, and be as fast with it."""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any

import torch


def device_name(device: torch.device) -> str:
    """The model of a GPU or CPU, or the kind of any other device, for a person to read."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpuinfo("model name") if device.type == "cpu" else str(device)


def described_device(device: torch.device) -> list[Any]:
    """What compiled code depends on of a device, as JSON-ready data: equal where the code runs."""
    # Graphs name the device by its index: those of one GPU are none of another's.
    if device.type == "cuda":
        versions = [torch.version.cuda, torch.version.hip]
        return [str(device), torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), *versions]
    if device.type == "cpu":
        # Libraries are compiled for all instructions that the CPU has, and would crash where one is missing.
        features = _cpuinfo("flags", "features")
        return ["cpu", torch.backends.cpu.get_cpu_capability(), features, torch.get_num_threads()]
    return [str(device)]


@functools.cache
def _cpuinfo(*fields: str) -> str:
    """What the system says of the CPU in the first of these fields that there is; its name, where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = (
        value.strip() for field, _, value in (line.partition(":") for line in lines) if field.strip().lower() in fields
    )
    return next(said, platform.processor() or platform.machine())
