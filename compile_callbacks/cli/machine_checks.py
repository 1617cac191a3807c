"""The checks of ``doctor`` outside of Python packages: GPU, cache folder, C++ compiler, and a compile."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import describe_failure, in_one_line

_MIN_CAPABILITY = (7, 0)  # Triton generates code for Volta and later
_MIN_FREE_GIB = 1.0  # a day of compiling fills hundreds of MiB
_OTHER_CACHE = "export TORCHINDUCTOR_CACHE_DIR=FOLDER"
_COMPILER_FOLDERS = ("/usr/bin", "/usr/local/bin")  # searched after those in PATH
_WITHOUT_CPP = "modules on a CPU run uncompiled; on any device, the template cpp_wrapper and AOTInductor do not work"
_PROGRAM = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
_DEBIAN_NAMES = {
    "python-headers": f"python{sys.version_info.major}.{sys.version_info.minor}-dev",
    "openmp": "libomp-dev",
}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        status: ``"ok"``; ``"warning"``: something may not work, or a part does not; ``"failed"``: it does not work.
        found: What this machine has.
        impact: What will not work; empty if everything does.
        fix: How to fix it; empty if there is nothing to fix.
    """

    status: Literal["ok", "warning", "failed"]
    found: str
    impact: str = ""
    fix: str = ""


def root_cause(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    return in_one_line(describe_failure(error))


def _install(package: str) -> str:
    """Return how to install ``"g++"``, ``"gcc"``, ``"python-headers"`` or ``"openmp"``."""
    if platform.system() == "Darwin":
        return "brew install libomp" if package == "openmp" else "xcode-select --install"
    return f"install {package} (apt-get install {_DEBIAN_NAMES.get(package, package)})"


def check_gpu() -> Check:
    """Check that torch can use the GPUs of this machine, and that Triton supports them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        kinds = Counter(f"{p.name} ({p.major}.{p.minor}, {p.total_memory / 2**30:.1f} GiB)" for p in properties)
        found = [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]
        found += [f"driver {version}" for version in sorted(set(_nvidia_smi("driver_version")))]
        if torch.version.hip or all((p.major, p.minor) >= _MIN_CAPABILITY for p in properties):
            return Check("ok", ", ".join(found))
        impact = "Triton needs compute capability {}.{} or higher: modules on an older GPU run uncompiled"
        return Check("failed", ", ".join(found), impact.format(*_MIN_CAPABILITY), "leave the modes at 'eager' there")
    if not (present := _nvidia_smi("name")):
        return Check("ok", "none: modules run on the CPU")
    reason = f": {in_one_line(str(caught[0].message))}" if caught else ""
    fix = f"a driver for CUDA {torch.version.cuda}, or a torch for an older CUDA"
    if not torch.version.cuda:
        fix = "a torch that is built with CUDA: https://pytorch.org/get-started/locally"
    found_text = f"{', '.join(present)}, which torch {torch.__version__} cannot use{reason}"
    return Check("warning", found_text, "modules run on the CPU", fix)


def _nvidia_smi(field: str) -> list[str]:
    """Return a line for each NVIDIA GPU; no line if the program is missing."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


def check_cache_folder() -> Check:
    """Check that Inductor's cache folder can be written to, has room, and is not mounted noexec."""
    try:
        folder = _torch.caches.cache_folder()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        name = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or error.filename or "the default folder"
        found = f"{name} cannot be written to: {error.strerror or error}"
        return Check(
            "failed", found, "nothing compiles: modules run uncompiled", f"{_OTHER_CACHE}, one that you may write to"
        )
    free_gib = shutil.disk_usage(folder).free / 2**30
    found = f"{folder}, {free_gib:.1f} GiB free"
    noexec = getattr(os, "ST_NOEXEC", 0)  # the system may have no such flag
    if noexec and os.statvfs(folder).f_flag & noexec:
        impact = "compiled code cannot be loaded: modules run uncompiled"
        return Check("failed", f"{found}, which is mounted noexec", impact, f"{_OTHER_CACHE}, on another file system")
    if free_gib < _MIN_FREE_GIB:
        impact = "compiling fails once the folder is full: modules run uncompiled from then on"
        return Check("warning", found, impact, f"empty the folder, or {_OTHER_CACHE}, on another file system")
    return Check("ok", found)


def check_cpp_compiler() -> Check:
    """Check that Inductor's C++ compiler builds a library with OpenMP that can be loaded."""
    try:
        compiler = _torch.inductor.cpp_compiler()
    except (RuntimeError, OSError, ValueError):
        tried = " and ".join(map(repr, _torch.inductor.cpp_compilers_tried()))
        found = f"none: {tried} does not run" if tried else "none: CXX is set to nothing"
        return Check("failed", found, _WITHOUT_CPP, _cpp_compiler_fix())
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        try:
            threads = ctypes.CDLL(str(_torch.inductor.build_cpp(source))).threads()
        except Exception as error:
            found = f"{compiler} cannot build a library with OpenMP: {root_cause(error)}"
            return Check("failed", found, _WITHOUT_CPP, f"{_install('openmp')} for clang; else {_cpp_compiler_fix()}")
    command = [*shlex.split(compiler), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    found = f"{version or compiler}; OpenMP has {threads} thread{'s' if threads != 1 else ''}"
    static_only = _finds(compiler, "libstdc++.a") and not _finds(compiler, "libstdc++.so")
    if platform.system() != "Linux" or not static_only:
        return Check("ok", found)
    impact = "it links a second C++ library next to torch's: AOTInductor's packages for a GPU crash with SIGSEGV"
    return Check("warning", f"{found}; there is no libstdc++.so for it", impact, _libstdcxx_fix())


def _cpp_compiler_fix() -> str:
    """Return the fix for a C++ compiler that does not work; Inductor uses ``CXX``, or else g++."""
    cxx = os.environ.get("CXX")
    if cxx is None:
        return f"{_install('g++')}, or set CXX to a compiler that is elsewhere"
    missing = "" if shutil.which("g++") else f" and {_install('g++')}"
    return f"unset CXX (it is {cxx!r}){missing}, or set it to a compiler that runs"


def _finds(compiler: str, library: str) -> bool:
    """Whether a compiler finds a library."""
    command = [*shlex.split(compiler), f"-print-file-name={library}"]  # prints the bare name if it is missing
    with contextlib.suppress(OSError):
        return os.sep in subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return False


def _libstdcxx_fix() -> str:
    """Return the fix for a compiler without libstdc++.so: another compiler on this machine that finds it, if any.

    ``LIBRARY_PATH`` does not help: the compiler linked its archive all the same when this was tried.
    """
    for folder in dict.fromkeys([*os.get_exec_path(), *_COMPILER_FOLDERS]):
        for name in ("g++", "c++", "clang++"):
            if (found := shutil.which(name, path=folder)) and _finds(found, "libstdc++.so"):
                return f"export CXX={shlex.quote(found)}"
    return f"{_install('g++')}, then export CXX=/usr/bin/g++"


def check_python_headers() -> Check:
    """Check that Python.h exists: Inductor's C++ kernels and Triton's launchers include it."""
    paths = (sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix"))
    headers = [Path(path, "Python.h") for path in dict.fromkeys(paths) if path]
    if header := next(filter(Path.is_file, headers), None):
        return Check("ok", str(header))
    found = f"no Python.h in {' or '.join(str(header.parent) for header in headers)}"
    impact = "no kernel can be built, neither Inductor's nor Triton's: modules run uncompiled"
    return Check("failed", found, impact, _install("python-headers"))


def check_compile(device: str) -> Check:
    """Check that an addition compiles on ``"cpu"`` or ``"cuda"``, and gives the right sum."""
    # A new number in each run, so that the code is in no cache and the compilers run.
    number = 1 + time.time_ns() % 2**40
    impact = f"modules on the {'CPU' if device == 'cpu' else 'GPU'} run uncompiled"

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + (number if torch.compiler.is_compiling() else 0)

    started = time.perf_counter()
    x = torch.arange(1000, device=device)
    try:
        total = torch.compile(add)(x)
    except Exception as error:
        return Check("failed", root_cause(error), impact, _compile_fix(root_cause(error)))
    seconds = time.perf_counter() - started
    if torch.equal(total, x):
        variables = "TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE and TORCHDYNAMO_SUPPRESS_ERRORS"
        return Check("failed", "torch.compile does nothing", impact, f"unset {variables}")
    if not torch.equal(total, x + number):
        impact = "compiled modules compute wrong results"
        return Check("failed", "an addition gives a wrong sum", impact, "pip install --force-reinstall torch")
    return Check("ok", f"an addition compiled in {seconds:.1f} s, with the right sum")


def _compile_fix(cause: str) -> str:
    if "C++ compiler" in cause:
        return _cpp_compiler_fix()
    if "C compiler" in cause:  # Triton builds its launchers with it
        return f"{_install('gcc')}, or set CC to a compiler that is elsewhere"
    return "fix the failures above; if nothing else failed, TORCH_LOGS='+inductor' prints more"
