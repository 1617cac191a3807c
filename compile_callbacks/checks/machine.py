"""GPUs, and the folder that compiled code is kept in."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

from compile_callbacks import _torch
from compile_callbacks.checks.check import Check
from compile_callbacks.failures import in_one_line

_LEAST_CAPABILITY = (7, 0)  # Triton generates code for Volta and later
_LEAST_FREE_GB = 1.0  # a day of compiling models fills hundreds of megabytes
_ELSEWHERE = "export TORCHINDUCTOR_CACHE_DIR=FOLDER"


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    with contextlib.suppress(Exception):
        return torch.cuda.is_available()
    return False


# ---------------------------------------------------------------------------------------------- GPU


def check_gpu() -> Check:
    """The GPUs that torch can use, and whether Triton knows them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return _without_gpu([str(warning.message) for warning in caught])
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = Counter(
        f"{p.name} (compute capability {p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB)" for p in properties
    )
    drivers = sorted(set(_nvidia_smi("driver_version")))
    found = ", ".join(
        [kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()]
        + [f"driver {version}" for version in drivers]
    )
    if torch.version.hip or all((p.major, p.minor) >= _LEAST_CAPABILITY for p in properties):
        return Check(found=found)
    return Check(
        status="failed",
        found=found,
        consequence=f"Triton needs compute capability {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} or higher: modules "
        "on an older GPU run uncompiled",
        remedy="leave the modes at 'eager' there",
    )


def _without_gpu(warned: list[str]) -> Check:
    present = _nvidia_smi("name")
    if not present:
        return Check(found="none: modules run on the CPU")
    has_cuda = bool(torch.version.cuda)
    why = f": {in_one_line(warned[0])}" if warned else ""
    return Check(
        status="warning",
        found=f"{', '.join(present)}, which torch {torch.__version__} cannot use{why}",
        consequence="modules run on the CPU",
        remedy=f"a driver for CUDA {torch.version.cuda}, or a torch for an older CUDA"
        if has_cuda
        else "a torch that is built with CUDA: https://pytorch.org/get-started/locally",
    )


def _nvidia_smi(field: str) -> list[str]:
    """A line for each of NVIDIA's GPUs; none where there is no such program."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


# ---------------------------------------------------------------------------------------------- cache folder


def check_cache_folder() -> Check:
    """Whether Inductor's cache can be written to, has room, and may hold libraries that are loaded."""
    try:
        folder = _torch.cache_folder()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        name = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or error.filename or "the default folder"
        return Check(
            status="failed",
            found=f"{name} cannot be written to: {error.strerror or error}",
            consequence="nothing can be compiled: modules run uncompiled",
            remedy=f"{_ELSEWHERE}, one that you may write to",
        )
    free_gb = shutil.disk_usage(folder).free / 2**30
    found = f"{folder}, {free_gb:.1f} GiB free on {_mount(folder)}"
    if _is_noexec(folder):
        return Check(
            status="failed",
            found=f"{found}, which is mounted noexec",
            consequence="what is compiled cannot be loaded: modules run uncompiled",
            remedy=f"{_ELSEWHERE}, on another file system",
        )
    if free_gb < _LEAST_FREE_GB:
        return Check(
            status="warning",
            found=found,
            consequence="compiling fails once it is full: modules run uncompiled from then on",
            remedy=f"empty it, or {_ELSEWHERE}, on another file system",
        )
    return Check(found=found)


def _is_noexec(folder: Path) -> bool:
    """Whether nothing may be loaded from there, where the system can tell."""
    flag = getattr(os, "ST_NOEXEC", 0)
    return bool(flag and os.statvfs(folder).f_flag & flag)


def _mount(folder: Path) -> str:
    """The file system that a folder is on: where it is mounted, and of which kind where that is known."""
    top = folder.resolve()
    while not top.is_mount():
        top = top.parent
    with contextlib.suppress(OSError):
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):  # the last one covers those before
            fields = line.split()
            if fields[1].replace("\\040", " ") == str(top):
                return f"{top} ({fields[2]})"
    return str(top)
