"""Python and packages: versions, and whether they can be imported beside each other."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re

import torch

from compile_callbacks.checks.check import Check, said
from compile_callbacks.checks.machine import has_gpu
from compile_callbacks.versions import installed_version

MINIMUM = {"python": "3.10", "torch": "2.11", "torchvision": "0.26", "lightning": "2.5.6", "tensorboard": "0"}
"""The oldest versions that are supported."""


def check_python() -> Check:
    """Whether Python is new enough."""
    version, minimum = platform.python_version(), MINIMUM["python"]
    if release(version) >= release(minimum):
        return Check(found=version)
    return Check(
        status="failed",
        found=f"{version}, and {minimum} or newer is needed",
        consequence="this library does not run",
        remedy=f"make an environment with Python {minimum} or newer",
    )


def check_torch() -> Check:
    """Whether torch is new enough."""
    return _check("torch", torch.__version__, consequence="this library does not run")


def check_torchvision() -> Check:
    """Whether torchvision can be imported beside this torch; a build for another torch cannot."""
    if (version := installed_version("torchvision")) is None:
        return Check(found="not installed; the examples need it, and bench for the names of models")
    return _check(
        "torchvision",
        version,
        consequence="`import lightning` fails with it, and so does InductorCompile; bench knows no names of models",
        mend="pip uninstall torchvision, or both from one index: pip install --force-reinstall torch torchvision",
    )


def check_lightning() -> Check:
    """Whether Lightning is new enough and can be imported."""
    return _check("lightning", installed_version("lightning"), consequence="InductorCompile cannot be imported")


def check_tensorboard() -> Check:
    """Whether TensorBoard can be imported."""
    consequence = "a TensorBoardLogger gets no report, and `compile-callbacks report` does not run"
    return _check("tensorboard", installed_version("tensorboard"), consequence=consequence)


def check_triton() -> Check:
    """Whether Triton can be imported and is the version that this torch is made for; needed on a GPU alone."""
    version, wanted = installed_version("triton"), _wanted_by_torch("triton")
    if version is None and not has_gpu():
        return Check(found="not installed; it is needed on a GPU alone")
    remedy = f"pip install 'triton{''.join(wanted)}'" if wanted else "pip install triton"
    consequence = "modules on a GPU run uncompiled"
    check = _check("triton", version, consequence=consequence, mend=remedy)
    if check.status != "ok" or wanted is None or version is None:
        return check
    if fits(version, *wanted):
        return Check(found=f"{version}, which torch {torch.__version__} asks for")
    return Check(
        status="warning",
        found=f"{version}, and torch {torch.__version__} asks for {''.join(wanted)}",
        consequence="modules on a GPU may not compile",
        remedy=remedy,
    )


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison.

    Example::

        >>> release("2.15.0a0+cu130") < release("2.15.1")
        True
    """
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def fits(version: str, operator: str, wanted: str) -> bool:
    """Whether a version is one that ``==`` or ``~=`` asks for.

    Example::

        >>> fits("3.9.1", "~=", "3.9.0"), fits("3.9.1", "==", "3.9.0"), fits("3.10.0", "~=", "3.9.0")
        (True, False, False)
    """
    ours, theirs = release(version), release(wanted)
    if operator == "==":
        return ours == theirs
    return ours >= theirs and ours[: len(theirs) - 1] == theirs[:-1]


def _check(package: str, version: str | None, *, consequence: str, mend: str = "") -> Check:
    """Whether a package is installed, new enough for this library, and importable."""
    minimum = MINIMUM.get(package, "0")
    wanted = package if minimum == "0" else f"'{package}>={minimum}'"
    if version is None:
        remedy = mend or f"pip install {wanted}"
        return Check(status="failed", found="not installed", consequence=consequence, remedy=remedy)
    if release(version) < release(minimum):
        found = f"{version}, and {minimum} or newer is needed"
        remedy = f"pip install --upgrade {wanted}"
        return Check(status="failed", found=found, consequence=consequence, remedy=remedy)
    try:
        importlib.import_module(package)
    except Exception as error:
        found = f"{version} cannot be imported: {said(error)}"
        remedy = mend or f"mend what it names, or pip install --force-reinstall {wanted}"
        return Check(status="failed", found=found, consequence=consequence, remedy=remedy)
    return Check(found=version)


def _wanted_by_torch(package: str) -> tuple[str, str] | None:
    """The version that torch's own metadata ask for, as operator and number; ``None`` where it names none."""
    try:
        requirements = importlib.metadata.requires("torch") or ()
    except importlib.metadata.PackageNotFoundError:  # a torch that was built in its source tree
        return None
    found = (re.match(rf"{package}\s*\(?(==|~=)\s*([\d.]+)", requirement) for requirement in requirements)
    return next(((match[1], match[2]) for match in found if match), None)
