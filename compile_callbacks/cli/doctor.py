"""``compile-callbacks doctor``: checks whether torch.compile can work on this machine, and prints a fix if not."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import importlib.metadata
import json
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from packaging.version import Version

from compile_callbacks import _torch
from compile_callbacks._utils.fingerprints import installed_version
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.report.console import print_texts

_MIN_CAPABILITY = (7, 0)  # Triton generates code for Volta and later
_MIN_FREE_GIB = 1.0  # a day of compiling fills hundreds of MiB
_OTHER_CACHE = "export TORCHINDUCTOR_CACHE_DIR=FOLDER"
_WITHOUT_CPP = "modules on a CPU run uncompiled; on any device, the template cpp_wrapper and AOTInductor do not work"
_PROGRAM = '#include <omp.h>\nextern "C" int threads() { return omp_get_max_threads(); }\n'
_DEBIAN_NAMES = {
    "python-headers": f"python{sys.version_info.major}.{sys.version_info.minor}-dev",
    "openmp": "libomp-dev",
}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    status: Literal["ok", "warning", "failed"]  # "warning" if some features may not work, "failed" if compiling fails
    found: str  # what the check found on this machine
    impact: str = ""  # the features that will not work
    fix: str = ""


def root_cause(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    return in_one_line(describe_failure(error))


def _install(package: str) -> str:
    """Return the advice that installs ``"g++"``, ``"gcc"``, ``"python-headers"`` or ``"openmp"``."""
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
        if torch.version.hip or all((p.major, p.minor) >= _MIN_CAPABILITY for p in properties):
            return Check("ok", ", ".join(found))
        impact = "Triton needs compute capability {}.{} or higher: modules on an older GPU run uncompiled"
        return Check("failed", ", ".join(found), impact.format(*_MIN_CAPABILITY), "leave the modes at 'eager' there")
    if not (present := _nvidia_smi()):
        return Check("ok", "none: modules run on the CPU")
    reason = f": {in_one_line(str(caught[0].message))}" if caught else ""
    fix = f"a driver for CUDA {torch.version.cuda}, or a torch for an older CUDA"
    if not torch.version.cuda:
        fix = "a torch that is built with CUDA: https://pytorch.org/get-started/locally"
    found_text = f"{', '.join(present)}, which torch {torch.__version__} cannot use{reason}"
    return Check("warning", found_text, "modules run on the CPU", fix)


def _nvidia_smi() -> list[str]:
    """Return the name of each NVIDIA GPU, or no name if ``nvidia-smi`` is not installed."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return []


def check_cache_folder() -> Check:
    """Check that Inductor's cache folder is writable, has free space, and is not mounted noexec."""
    try:
        folder = _torch.inductor.cache_folder()
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        name = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or error.filename or "the default folder"
        found = f"{name} cannot be written to: {error.strerror or error}"
        impact = "nothing compiles: modules run uncompiled"
        return Check("failed", found, impact, f"{_OTHER_CACHE}, one that you may write to")
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
    """Check that Inductor's C++ compiler can build a library with OpenMP, and that Python can load the library."""
    try:
        compiler = _torch.inductor.cpp_compiler()
    except (RuntimeError, OSError, ValueError):
        found = f"none: {os.environ.get('CXX', 'g++')!r} does not run"
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
    # Setting LIBRARY_PATH is not a fix: in a test, the compiler still linked its static library.
    fix = f"{_install('g++')}, then export CXX=/usr/bin/g++, or another compiler that has libstdc++.so"
    return Check("warning", f"{found}; there is no libstdc++.so for it", impact, fix)


def _cpp_compiler_fix() -> str:
    """Return the fix for a C++ compiler that does not work. Inductor uses ``CXX``, or g++ if it is not set."""
    cxx = os.environ.get("CXX")
    if cxx is None:
        return f"{_install('g++')}, or set CXX to a compiler that is elsewhere"
    missing = "" if shutil.which("g++") else f" and {_install('g++')}"
    return f"unset CXX (it is {cxx!r}){missing}, or set it to a compiler that runs"


def _finds(compiler: str, library: str) -> bool:
    """Return whether a compiler finds a library."""
    command = [*shlex.split(compiler), f"-print-file-name={library}"]  # prints the bare name of a missing library
    with contextlib.suppress(OSError):
        return os.sep in subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return False


def check_python_headers() -> Check:
    """Check that Python.h exists, because Inductor's C++ kernels and Triton's launchers include it."""
    paths = (sysconfig.get_path("include"), sysconfig.get_path("include", "posix_prefix"))
    headers = [Path(path, "Python.h") for path in dict.fromkeys(paths) if path]
    if header := next(filter(Path.is_file, headers), None):
        return Check("ok", str(header))
    found = f"no Python.h in {' or '.join(str(header.parent) for header in headers)}"
    impact = "Inductor and Triton cannot build kernels: modules run uncompiled"
    return Check("failed", found, impact, _install("python-headers"))


def check_compile(device: str) -> Check:
    """Check that an addition compiles on ``"cpu"`` or ``"cuda"``, and returns the right sum."""
    # Uses a new number in each run, so that the compilers run instead of loading the code from a cache.
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
        return Check("failed", "a compiled addition returns a wrong sum", impact, "pip install --force-reinstall torch")
    return Check("ok", f"an addition compiled in {seconds:.1f} s, with the right sum")


def _compile_fix(cause: str) -> str:
    if "C++ compiler" in cause:
        return _cpp_compiler_fix()
    if "C compiler" in cause:  # Triton builds its launchers with it
        return f"{_install('gcc')}, or set CC to a compiler that is elsewhere"
    return "fix the failures above; if nothing else failed, TORCH_LOGS='+inductor' prints more"


_DESCRIPTION = """\
Check everything that torch.compile needs, and compile an addition. If something is missing, print what will not work
and how to fix it. The exit status is 1 if a check failed; a missing GPU is not a failure.
"""

_MINIMUM = {"torch": "2.11", "torchvision": "0.26", "lightning": "2.5.6", "tensorboard": "0", "triton": "0"}
_IMPACT = {
    "torch": "this library does not run",
    "torchvision": "`import lightning` and InductorCompile fail",
    "lightning": "InductorCompile cannot be imported",
    "tensorboard": "a TensorBoardLogger gets no report",
    "triton": "modules on a GPU run uncompiled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print their results. Return status 1 if a check failed."""
    if not args.json:
        sys.stdout.write("checking this machine and compiling an addition, which takes up to 20 s ...\n\n")
        sys.stdout.flush()
    checks = run_checks()
    failures = sum(check.status == "failed" for check in checks.values())
    if args.json:
        data = {"ok": not failures, "checks": [{"name": name, **asdict(check)} for name, check in checks.items()]}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
        return 1 if failures else 0
    print_texts(("check", "status", "found"), [(name, check.status, check.found) for name, check in checks.items()])
    for name, check in checks.items():
        if check.impact:
            sys.stdout.write(f"\n{name}: {check.impact}\n  to fix it: {check.fix}\n")
    next_step = "nothing failed: add InductorCompile() to your Trainer's callbacks"
    sys.stdout.write(f"\n{failures} of {len(checks)} checks failed\n" if failures else f"\n{next_step}\n")
    return 1 if failures else 0


def run_checks() -> dict[str, Check]:
    """Run all checks, and return the results by name. A check that raises an exception becomes a warning."""
    checks = {}
    for name, check in _CHECKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # because the check reports the same problem
            try:
                result = check()
            except Exception as error:
                result = Check("warning", f"the check failed: {root_cause(error)}")
        if result is not None:
            checks[name] = result
    return checks


def _check_package(package: str, fix: str = "") -> Check:
    """Check that a package is installed, new enough for this library, and importable."""
    version = torch.__version__ if package == "torch" else installed_version(package)  # torch may be a source tree
    minimum = _MINIMUM[package]
    wanted = package if minimum == "0" else f"'{package}>={minimum}'"
    if version is None:
        return Check("failed", "not installed", _IMPACT[package], fix or f"pip install {wanted}")
    if Version(version) < Version(minimum):
        found = f"{version}, but this library needs {minimum} or newer"
        return Check("failed", found, _IMPACT[package], fix or f"pip install --upgrade {wanted}")
    try:
        importlib.import_module(package)
    except Exception as error:
        found = f"{version} cannot be imported: {root_cause(error)}"
        fix = fix or f"fix the cause, or pip install --force-reinstall {wanted}"
        return Check("failed", found, _IMPACT[package], fix)
    return Check("ok", version)


def _check_torchvision() -> Check:
    """Check that Python can import torchvision with this torch. The import fails if it was built for another torch."""
    if installed_version("torchvision") is None:
        return Check("ok", "not installed; the examples need it")
    both = "pip install --force-reinstall torch torchvision"
    return _check_package("torchvision", f"pip uninstall torchvision, or both from one index: {both}")


def _check_triton() -> Check:
    """Check that Python can import Triton, which only GPUs need."""
    if installed_version("triton") is None and not torch.cuda.is_available():
        return Check("ok", "not installed; only GPUs need Triton")
    return _check_package("triton", "pip install --force-reinstall torch, which installs the Triton that it requires")


_CHECKS: dict[str, Callable[[], Check | None]] = {
    "python": lambda: Check("ok", platform.python_version()),
    "torch": partial(_check_package, "torch"),
    "torchvision": _check_torchvision,
    "triton": _check_triton,
    "lightning": partial(_check_package, "lightning"),
    "tensorboard": partial(_check_package, "tensorboard"),
    "GPU": check_gpu,
    "C++ compiler": check_cpp_compiler,
    "Python headers": check_python_headers,
    "cache folder": check_cache_folder,
    "compile on CPU": partial(check_compile, "cpu"),
    "compile on GPU": lambda: check_compile("cuda") if torch.cuda.is_available() else None,
}
