"""Checks a ``device`` argument, finds the device of a module, and names the hardware."""

from __future__ import annotations

import contextlib
import itertools
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type


def as_device(device: Any, argument: str = "device") -> torch.device:
    """Check a device argument, and return the device with its index if its type has one."""
    check_type(argument, device, (str, torch.device), "a string or a torch.device")
    try:
        resolved = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        # An unknown name, a missing GPU and a build without CUDA raise the same type, so pass on torch's message.
        reason = str(error).splitlines()[0]
        raise ValueError(with_code("CC201", f"{argument}={str(device)!r} cannot be used: {reason}")) from error
    if resolved.type == "meta":
        raise ValueError(with_code("CC201", f"{argument}='meta' cannot be used, because its tensors have no values"))
    return resolved


def device_of(module: nn.Module) -> torch.device:
    """Return the device of the first weight of a module, or torch's default device if the module has no weights."""
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.get_default_device() if tensor is None else tensor.device


def free_memory(device: torch.device) -> int | None:
    """Return the number of bytes that torch can still allocate on a device, or ``None`` if it is unknown."""
    if device.type == "cpu":
        return _free_host_memory()
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    limit = int(total * torch.cuda.get_per_process_memory_fraction(device))
    return min(free + torch.cuda.memory_reserved(device), limit) - torch.cuda.memory_allocated(device)


_CGROUP = Path("/sys/fs/cgroup")


def _free_host_memory() -> int | None:
    """Return the available memory of a Linux machine, or the rest of a container's limit (cgroup v2)."""
    free = None
    with contextlib.suppress(OSError, ValueError, LookupError):  # no such file, or no limit ("max")
        free = 1024 * int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0])
        # The cache of files counts as used, and the kernel frees it when it needs memory.
        cached = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())["inactive_file"]
        used = int((_CGROUP / "memory.current").read_text()) - int(cached)
        free = min(free, int((_CGROUP / "memory.max").read_text()) - used)
    return free


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the type and the instructions of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
