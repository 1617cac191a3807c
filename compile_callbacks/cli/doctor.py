"""Check everything that torch.compile needs, and compile an addition.

If something is missing, print what will not work and how to fix it. The exit status is 1 if a check failed; a missing
GPU is not a failure.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import shutil
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.files import installed_version
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.report.render import print_texts
from compile_callbacks.session.grad_mode import compile_phases, restore

_FIXES = {
    r"Python\.h": f"apt-get install python{sys.version_info.major}.{sys.version_info.minor}-dev",
    r"omp\.h|libomp|gomp|-lomp": "use g++; for clang, apt-get install libomp-dev (macOS: brew install libomp)",
    r"C\+\+ compiler|CppCompiler": "apt-get install g++ (macOS: xcode-select --install), and unset CXX or set it to a "
    "compiler that runs",
    r"C compiler": "apt-get install gcc, or set CC to a compiler that runs",  # Triton builds its launchers with it
    # A library in a folder that is mounted noexec is not mapped.
    r"failed to map segment|Permission|Read-only|No space": "export TORCHINDUCTOR_CACHE_DIR=FOLDER, which is writable, "
    "has free space and is not mounted noexec",
    r"": "set TMPDIR to a folder without a space, if it has one; TORCH_LOGS='+inductor' prints more",
}
"""The fix for the first pattern that occurs in the cause of a failed compile."""

_PACKAGES = {
    "torch": "this library does not run",
    "torchvision": "`import lightning` and InductorCompile fail",
    "triton": "modules on a GPU run uncompiled",
    "lightning": "InductorCompile cannot be imported",
    "tensorboard": "a TensorBoardLogger gets no report",
}
"""What fails without each package."""


class Check(NamedTuple):
    """The result of one check."""

    status: Literal["ok", "warning", "failed"]  # "warning" if some features may not work, "failed" if compiling fails
    result: str
    impact: str = ""  # the features that will not work
    fix: str = ""


def check_package(package: str) -> Check:
    """Check that a package is installed and importable. pip checks that it is new enough."""
    version = torch.__version__ if package == "torch" else installed_version(package)  # torch may be a source tree
    if version is None and (users := {"torchvision": "some examples", "triton": "GPUs"}.get(package)):
        return Check("ok", f"not installed, and needed for {users} only")
    try:
        importlib.import_module(package)  # fails if torchvision was built for another torch
    except Exception as error:
        problem = f"{version or 'not installed'}, cannot be imported: {in_one_line(describe_failure(error))}"
        fix = f"pip install --force-reinstall {' '.join(dict.fromkeys(('torch', package)))}, all from one index"
        return Check("failed", problem, _PACKAGES[package], fix)
    return Check("ok", version or "installed")


def check_gpu() -> Check:
    """Check that torch can use the GPUs of this machine."""
    if torch.cuda.is_available():
        names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Check("ok", ", ".join(f"{count} x {name}" if count > 1 else name for name, count in names.items()))
    if shutil.which("nvidia-smi") is None:
        return Check("ok", "none: modules run on the CPU")
    fix = f"a driver for CUDA {torch.version.cuda}, or another torch: https://pytorch.org/get-started/locally"
    return Check("warning", f"torch {torch.__version__} cannot use the GPUs", "modules run on the CPU", fix)


def check_compile(device: str) -> Check:
    """Check that an addition compiles on ``"cpu"`` or ``"cuda"``, and returns the right sum."""
    # Uses a new number in each run, so that the compilers run instead of loading the code from a cache.
    number, started = 1 + time.time_ns() % 2**40, time.perf_counter()
    impact = f"modules on the {'CPU' if device == 'cpu' else 'GPU'} run uncompiled"

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + (number if torch.compiler.is_compiling() else 0)

    x = torch.arange(1000, device=device)
    try:
        total = torch.compile(add)(x)
    except Exception as error:
        cause = describe_failure(error)
        fix = next(fix for pattern, fix in _FIXES.items() if re.search(pattern, cause))
        return Check("failed", in_one_line(cause), impact, fix)
    if torch.equal(total, x):
        fix = "unset TORCH_COMPILE_DISABLE, TORCHDYNAMO_DISABLE and TORCHDYNAMO_SUPPRESS_ERRORS"
        return Check("failed", "torch.compile does nothing", impact, fix)
    if not torch.equal(total, x + number):
        impact = "compiled modules compute wrong results"
        return Check("failed", "a compiled addition returns a wrong sum", impact, "pip install --force-reinstall torch")
    return Check("ok", f"an addition compiled in {time.perf_counter() - started:.1f} s, with the right sum")


def check_torch() -> Check:
    """Check that the private parts of torch are there with which this library compiles a training step."""
    net = torch.nn.Linear(1, 1)
    options = {"fallback_by_default": True}  # compiles no C++
    try:
        compile_phases(net, {"options": options}, None)(torch.ones(2, 1)).sum().backward()
    finally:
        restore(net)
    if not (notes := _torch.ports.notes()):
        return Check("ok", "all that this library uses are there")
    fix = "update compile-callbacks, or install torch {}.{}".format(*_torch.ports.NEWEST_TESTED)
    return Check("warning", "; ".join(notes), "some figures or repairs are missing, or modules run uncompiled", fix)


_CHECKS: dict[str, Callable[[], Check | None]] = {
    "python": lambda: Check("ok", platform.python_version()),
    **{package: partial(check_package, package) for package in _PACKAGES},
    "GPU": check_gpu,
    "parts of torch": check_torch,
    "compile on CPU": partial(check_compile, "cpu"),
    "compile on GPU": lambda: check_compile("cuda") if torch.cuda.is_available() else None,
}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "--json": {"action": "store_true", "dest": "as_json", "help": "print the checks as JSON"}
}


def run(as_json: bool) -> int:
    """Run the checks and print their results. Return status 1 if a check failed."""
    if not as_json:
        sys.stdout.write("checking this machine and compiling an addition, which takes about 20 s ...\n\n")
        sys.stdout.flush()
    checks = {name: check for name, run_check in _CHECKS.items() if (check := _result_of(run_check)) is not None}
    failures = sum(check.status == "failed" for check in checks.values())
    if as_json:
        data = {"ok": not failures, "checks": [{"name": name, **check._asdict()} for name, check in checks.items()]}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        print_texts(("check", "status", "found"), [(name, *check[:2]) for name, check in checks.items()])
        for name, check in checks.items():
            if check.impact:
                sys.stdout.write(f"\n{name}: {check.impact}\n  to fix it: {check.fix}\n")
        success = "nothing failed: add InductorCompile() to your Trainer's callbacks"
        sys.stdout.write(f"\n{f'{failures} of {len(checks)} checks failed' if failures else success}\n")
    return int(failures > 0)


def _result_of(check: Callable[[], Check | None]) -> Check | None:
    """Run a check. A check that raises an exception becomes a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # because the check reports the same problem
        try:
            return check()
        except Exception as error:
            return Check("warning", f"the check failed: {in_one_line(describe_failure(error))}")
