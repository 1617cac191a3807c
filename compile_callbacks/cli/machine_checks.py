"""What torch.compile needs of the machine: a GPU, a cache folder, a C++ compiler, and a compile that works."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import in_one_line
from compile_callbacks.cli.package_checks import Check, install, said

_MIN_CAPABILITY = (7, 0)  # Triton generates code for Volta and later
_MIN_FREE_GIB = 1.0  # a day of compiling fills hundreds of MiB
_ELSEWHERE = "export TORCHINDUCTOR_CACHE_DIR=FOLDER"

_PROGRAM = """\
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
"""
_COMPILER_FOLDERS = ("/usr/bin", "/usr/local/bin")  # searched after those in PATH
_WITHOUT_CPP = "modules on a CPU run uncompiled; on any device, the template cpp_wrapper and AOTInductor do not work"


# ---------------------------------------------------------------------------------------------- GPU


def check_gpu() -> Check:
    """Check the GPUs that torch can use, and that Triton supports them."""
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
    if torch.version.hip or all((p.major, p.minor) >= _MIN_CAPABILITY for p in properties):
        return Check(found=found)
    return Check(
        status="failed",
        found=found,
        consequence=f"Triton needs compute capability {_MIN_CAPABILITY[0]}.{_MIN_CAPABILITY[1]} or higher: modules "
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
    """Return a line for each NVIDIA GPU; no line if the program is missing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


# ---------------------------------------------------------------------------------------------- cache folder


def check_cache_folder() -> Check:
    """Check that Inductor's cache folder can be written to, has room, and is not mounted noexec."""
    try:
        folder = _torch.caches.cache_folder()
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
    free_gib = shutil.disk_usage(folder).free / 2**30
    found = f"{folder}, {free_gib:.1f} GiB free"
    if _is_noexec(folder):
        return Check(
            status="failed",
            found=f"{found}, which is mounted noexec",
            consequence="what is compiled cannot be loaded: modules run uncompiled",
            remedy=f"{_ELSEWHERE}, on another file system",
        )
    if free_gib < _MIN_FREE_GIB:
        return Check(
            status="warning",
            found=found,
            consequence="compiling fails once it is full: modules run uncompiled from then on",
            remedy=f"empty it, or {_ELSEWHERE}, on another file system",
        )
    return Check(found=found)


def _is_noexec(folder: Path) -> bool:
    """Whether the folder is mounted noexec, if the system can tell."""
    flag = getattr(os, "ST_NOEXEC", 0)
    return bool(flag and os.statvfs(folder).f_flag & flag)


# ---------------------------------------------------------------------------------------------- toolchain


def check_cpp_compiler() -> Check:
    """Check that Inductor's C++ compiler builds a library with OpenMP that can be loaded."""
    try:
        compiler = _torch.inductor.cpp_compiler()
    except (RuntimeError, OSError, ValueError):
        tried = " and ".join(map(repr, _torch.inductor.cpp_compilers_tried()))
        return Check(
            status="failed",
            found=f"none: {tried} does not run" if tried else "none: CXX is set to nothing",
            consequence=_WITHOUT_CPP,
            remedy=_cpp_compiler_remedy(),
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        try:
            threads = ctypes.CDLL(str(_torch.inductor.build_cpp(source))).threads()
        except Exception as error:
            return Check(
                status="failed",
                found=f"{compiler} cannot build a library with OpenMP: {said(error)}",
                consequence=_WITHOUT_CPP,
                remedy=f"{install('openmp')} for clang; else {_cpp_compiler_remedy()}",
            )
    found = f"{_version_line(compiler)}; OpenMP has {threads} thread{'s' if threads != 1 else ''}"
    static_only = _finds(compiler, "libstdc++.a") and not _finds(compiler, "libstdc++.so")
    if platform.system() == "Linux" and static_only:
        return Check(
            status="warning",
            found=f"{found}; there is no libstdc++.so for it",
            consequence="it links a second C++ library next to torch's: AOTInductor's packages for a GPU crash with "
            "SIGSEGV",
            remedy=_libstdcxx_remedy(),
        )
    return Check(found=found)


def _finds(compiler: str, library: str) -> bool:
    """Whether a compiler finds a library."""
    command = [*shlex.split(compiler), f"-print-file-name={library}"]  # prints the bare name if it is missing
    with contextlib.suppress(OSError):
        return os.sep in subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return False


def _libstdcxx_remedy() -> str:
    """Return the remedy for a compiler without libstdc++.so: another one on this machine that finds it, if any.

    ``LIBRARY_PATH`` is no remedy: the compiler linked its archive all the same when it was tried.
    """
    for folder in dict.fromkeys([*os.get_exec_path(), *_COMPILER_FOLDERS]):
        for name in ("g++", "c++", "clang++"):
            if (found := shutil.which(name, path=folder)) and _finds(found, "libstdc++.so"):
                return f"export CXX={shlex.quote(found)}"
    return f"{install('g++')}, then export CXX=/usr/bin/g++"


def check_python_headers() -> Check:
    """Check that Python.h exists: Inductor's C++ kernels and Triton's launchers include it."""
    paths = (sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix"))
    folders = list(dict.fromkeys(path for path in paths if path))
    for folder in folders:
        if Path(folder, "Python.h").is_file():
            return Check(found=str(Path(folder, "Python.h")))
    return Check(
        status="failed",
        found=f"no Python.h in {' or '.join(folders)}",
        consequence="no kernel can be built, Triton's neither: modules run uncompiled",
        remedy=install("python-headers"),
    )


def _version_line(compiler: str) -> str:
    done = subprocess.run([*shlex.split(compiler), "--version"], capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or [compiler])[0]


def _cpp_compiler_remedy() -> str:
    """Return the remedy for a C++ compiler that does not work; Inductor uses ``CXX``, or else g++."""
    cxx = os.environ.get("CXX")
    if cxx is None:
        return f"{install('g++')}, or set CXX to a compiler that is elsewhere"
    missing = "" if shutil.which("g++") else f" and {install('g++')}"
    return f"unset CXX (it is {cxx!r}){missing}, or set it to a compiler that runs"


# ---------------------------------------------------------------------------------------------- compiling


def check_compile_on_cpu() -> Check:
    """Check that an addition compiles on the CPU and gives the right sum."""
    return _compile_on("cpu")


def check_compile_on_gpu() -> Check | None:
    """Check the same on the GPU; ``None`` if there is no GPU."""
    return _compile_on("cuda") if torch.cuda.is_available() else None


def _compile_on(device: str) -> Check:
    # A new number in each run, so that the code is in no cache and the compilers run.
    number = 1 + time.time_ns() % 2**40
    consequence = f"modules on the {device.replace('cuda', 'GPU').replace('cpu', 'CPU')} run uncompiled"

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + (number if torch.compiler.is_compiling() else 0)

    started = time.perf_counter()
    x = torch.arange(1000, device=device)
    try:
        total = torch.compile(add)(x)
    except Exception as error:
        return Check(status="failed", found=said(error), consequence=consequence, remedy=_remedy(said(error)))
    seconds = time.perf_counter() - started
    if torch.equal(total, x):
        return Check(
            status="failed",
            found="torch.compile does nothing",
            consequence=consequence,
            remedy="unset TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE and TORCHDYNAMO_SUPPRESS_ERRORS",
        )
    if not torch.equal(total, x + number):
        return Check(
            status="failed",
            found="an addition gives a wrong sum",
            consequence="compiled modules compute something else",
            remedy="pip install --force-reinstall torch",
        )
    return Check(found=f"an addition compiled in {seconds:.1f} s, with the right sum")


def _remedy(found: str) -> str:
    if "C++ compiler" in found:
        return _cpp_compiler_remedy()
    if "C compiler" in found:  # Triton builds its launchers with it
        return f"{install('gcc')}, or set CC to a compiler that is elsewhere"
    return "the remedies of the checks before this one; if there are none, TORCH_LOGS='+inductor' says more"
