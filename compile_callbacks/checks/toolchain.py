"""What Inductor builds its kernels with: a C++ compiler with OpenMP, and Python's headers."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from compile_callbacks import _torch
from compile_callbacks.checks.check import Check, said
from compile_callbacks.checks.remedies import install

_PROGRAM = """\
#include <omp.h>
extern "C" int threads() { return omp_get_max_threads(); }
"""
_CONSEQUENCE = "modules on a CPU run uncompiled; on any device, the template cpp_wrapper and AOTInductor do not work"


def check_cpp_compiler() -> Check:
    """Whether Inductor's C++ compiler builds a library with OpenMP that can be loaded."""
    try:
        compiler = _torch.cpp_compiler()
    except (RuntimeError, OSError, ValueError):
        tried = " and ".join(map(repr, _torch.cpp_compilers_tried()))
        return Check(
            status="failed",
            found=f"none: {tried} does not run" if tried else "none: CXX is set to nothing",
            consequence=_CONSEQUENCE,
            remedy=cpp_compiler_remedy(),
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM)
        try:
            threads = ctypes.CDLL(str(_torch.build_cpp(source))).threads()
        except Exception as error:
            return Check(
                status="failed",
                found=f"{compiler} cannot build a library with OpenMP: {said(error)}",
                consequence=_CONSEQUENCE,
                remedy=f"{install('openmp')} for clang; else {cpp_compiler_remedy()}",
            )
    found = f"{_version_line(compiler)}; OpenMP has {threads} thread{'s' if threads != 1 else ''}"
    if _links_own_libstdcxx(compiler):
        return Check(
            status="warning",
            found=f"{found}; there is no libstdc++.so for it",
            consequence="it links a C++ library of its own beside torch's: AOTInductor's packages for a GPU may crash",
            remedy=f"{install('g++')} and CXX=g++, or a folder in LIBRARY_PATH where libstdc++.so is libstdc++.so.6",
        )
    return Check(found=found)


def _links_own_libstdcxx(compiler: str) -> bool:
    """Whether a compiler for Linux has libstdc++ as an archive alone, which it then links into each library."""
    if platform.system() != "Linux":
        return False

    def is_there(library: str) -> bool:
        command = [*shlex.split(compiler), f"-print-file-name={library}"]  # prints the bare name of what is not there
        return os.sep in subprocess.run(command, capture_output=True, text=True, check=False).stdout

    return is_there("libstdc++.a") and not is_there("libstdc++.so")


def check_python_headers() -> Check:
    """Whether Python.h is there: Inductor's C++ kernels include it, and so does what launches Triton's."""
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


def cpp_compiler_remedy() -> str:
    """What to do about a C++ compiler that does not work; Inductor takes what ``CXX`` says, and else g++."""
    cxx = os.environ.get("CXX")
    if cxx is None:
        return f"{install('g++')}, or set CXX to a compiler that is elsewhere"
    missing = "" if shutil.which("g++") else f" and {install('g++')}"
    return f"unset CXX (it is {cxx!r}){missing}, or set it to a compiler that runs"
