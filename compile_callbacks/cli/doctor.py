"""``compile-callbacks doctor``: checks whether torch.compile can work on this machine, and says how to fix it."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import platform
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from compile_callbacks._utils.fingerprints import installed_version
from compile_callbacks.cli import machine_checks as machine
from compile_callbacks.cli.machine_checks import Check, root_cause
from compile_callbacks.report.console import print_texts

_DESCRIPTION = """\
Check everything that torch.compile needs, and compile an addition. If something is missing, say what will not work and
how to fix it. The exit status is 1 if a check failed; a missing GPU is not a failure.
"""

_MINIMUM = {"torch": "2.11", "torchvision": "0.26", "lightning": "2.5.6", "tensorboard": "0", "triton": "0"}
_IMPACT = {
    "torch": "this library does not run",
    "torchvision": "`import lightning` fails with it, and so does InductorCompile; bench knows no names of models",
    "lightning": "InductorCompile cannot be imported",
    "tensorboard": "a TensorBoardLogger gets no report",
    "triton": "modules on a GPU run uncompiled",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = _DESCRIPTION
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the checks and print them; the status is 1 if a check failed."""
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
    sys.stdout.write(f"\n{failures} of {len(checks)} checks failed\n" if failures else "\nnothing failed\n")
    return 1 if failures else 0


def run_checks() -> dict[str, Check]:
    """Run all checks, and return the results by name. A check that raises is a warning."""
    checks = {}
    for name, check in _CHECKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check reports the same
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
        found = f"{version}, and {minimum} or newer is needed"
        return Check("failed", found, _IMPACT[package], fix or f"pip install --upgrade {wanted}")
    try:
        importlib.import_module(package)
    except Exception as error:
        found = f"{version} cannot be imported: {root_cause(error)}"
        return Check(
            "failed", found, _IMPACT[package], fix or f"fix the cause, or pip install --force-reinstall {wanted}"
        )
    return Check("ok", version)


def _check_torchvision() -> Check:
    """Check that torchvision can be imported with this torch; a build for another torch cannot."""
    if installed_version("torchvision") is None:
        return Check("ok", "not installed; the examples need it, and bench for the names of models")
    both = "pip install --force-reinstall torch torchvision"
    return _check_package("torchvision", f"pip uninstall torchvision, or both from one index: {both}")


def _check_triton() -> Check:
    """Check that Triton is the version that this torch requires; only a GPU needs it."""
    version, required = installed_version("triton"), _required_by_torch("triton")
    if version is None and not torch.cuda.is_available():
        return Check("ok", "not installed; only a GPU needs it")
    fix = f"pip install 'triton{required}'"
    check = _check_package("triton", fix)
    if check.status != "ok" or version is None or not required:
        return check
    if required.contains(version, prereleases=True):
        return Check("ok", f"{version}, which torch {torch.__version__} requires")
    found = f"{version}, and torch {torch.__version__} requires {required}"
    return Check("warning", found, "modules on a GPU may not compile", fix)


def _required_by_torch(package: str) -> SpecifierSet:
    """The versions of a package that torch's metadata require; an empty set of conditions if it names none."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("torch") or ())
    except importlib.metadata.PackageNotFoundError:  # torch was built in its source tree
        return SpecifierSet()
    return next((found.specifier for found in requirements if found.name == package), SpecifierSet())


_CHECKS: dict[str, Callable[[], Check | None]] = {
    "python": lambda: Check("ok", platform.python_version()),
    "torch": partial(_check_package, "torch"),
    "torchvision": _check_torchvision,
    "triton": _check_triton,
    "lightning": partial(_check_package, "lightning"),
    "tensorboard": partial(_check_package, "tensorboard"),
    "GPU": machine.check_gpu,
    "C++ compiler": machine.check_cpp_compiler,
    "Python headers": machine.check_python_headers,
    "cache folder": machine.check_cache_folder,
    "compile on CPU": partial(machine.check_compile, "cpu"),
    "compile on GPU": lambda: machine.check_compile("cuda") if torch.cuda.is_available() else None,
}
