"""What a run ran on: the versions and the device that its numbers hold for."""

from __future__ import annotations

import platform

import torch

from compile_callbacks.versions import installed_version

_PACKAGES = ("torch", "triton", "lightning", "compile-callbacks")


def environment() -> dict[str, str]:
    """Versions and device by name, for a person to read; what is not installed is left out."""
    installed = {package: version for package in _PACKAGES if (version := installed_version(package)) is not None}
    return {"python": platform.python_version(), **installed, "device": _device()}


def _device() -> str:
    # A GPU that nothing has touched did not run the steps.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        return torch.cuda.get_device_name() + (f" (1 of {count})" if count > 1 else "")
    threads = torch.get_num_threads()
    return (
        f"CPU: {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} thread{'s' if threads > 1 else ''}"
    )
