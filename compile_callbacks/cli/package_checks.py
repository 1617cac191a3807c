"""`Check`, the result of one check; and checks of the versions of packages, and that they can be imported."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from compile_callbacks._utils.fingerprints import installed_version
from compile_callbacks._utils.messages import describe_failure, in_one_line

Status = Literal["ok", "warning", "failed"]

# Package names of Debian and Ubuntu, if they differ from the name of the tool.
_DEBIAN = {"python-headers": f"python{sys.version_info.major}.{sys.version_info.minor}-dev", "openmp": "libomp-dev"}


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked.
        status: ``"ok"``; ``"warning"``: something may not work, or a part does not; ``"failed"``: it does not work.
        found: What the machine has.
        consequence: What will not work; empty if everything does.
        remedy: How to fix it; empty if there is nothing to fix.
    """

    name: str = ""
    status: Status = "ok"
    found: str = ""
    consequence: str = ""
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        """The check as JSON-ready data."""
        return asdict(self)


def said(error: BaseException) -> str:
    """Return the root cause of an error in one line."""
    return in_one_line(describe_failure(error))


def install(package: str) -> str:
    """Return how to install a package.

    Args:
        package: ``"g++"``, ``"gcc"``, ``"python-headers"`` or ``"openmp"``.
    """
    if platform.system() == "Darwin":
        return "brew install libomp" if package == "openmp" else "xcode-select --install"
    return f"install {package} (apt-get install {_DEBIAN.get(package, package)})"


MINIMUM = {"torch": "2.11", "torchvision": "0.26", "lightning": "2.5.6", "tensorboard": "0"}
"""The oldest versions that are supported."""


def check_python() -> Check:
    """Report the version of Python; an older one than pip requires cannot import this library."""
    return Check(found=platform.python_version())


def check_torch() -> Check:
    """Check that torch is new enough."""
    return _check("torch", torch.__version__, consequence="this library does not run")


def check_torchvision() -> Check:
    """Check that torchvision can be imported with this torch; a build for another torch cannot."""
    if (version := installed_version("torchvision")) is None:
        return Check(found="not installed; the examples need it, and bench for the names of models")
    return _check(
        "torchvision",
        version,
        consequence="`import lightning` fails with it, and so does InductorCompile; bench knows no names of models",
        remedy="pip uninstall torchvision, or both from one index: pip install --force-reinstall torch torchvision",
    )


def check_lightning() -> Check:
    """Check that Lightning is new enough and can be imported."""
    return _check("lightning", installed_version("lightning"), consequence="InductorCompile cannot be imported")


def check_tensorboard() -> Check:
    """Check that TensorBoard can be imported."""
    consequence = "a TensorBoardLogger gets no report, and `compile-callbacks report` does not run"
    return _check("tensorboard", installed_version("tensorboard"), consequence=consequence)


def check_triton() -> Check:
    """Check that Triton can be imported and is the version that this torch requires; only a GPU needs it."""
    version, required = installed_version("triton"), required_by_torch("triton")
    if version is None and not torch.cuda.is_available():
        return Check(found="not installed; it is needed on a GPU alone")
    remedy = f"pip install 'triton{required}'"
    consequence = "modules on a GPU run uncompiled"
    check = _check("triton", version, consequence=consequence, remedy=remedy)
    if check.status != "ok" or version is None or not required:
        return check
    if required.contains(version, prereleases=True):
        return Check(found=f"{version}, which torch {torch.__version__} asks for")
    return Check(
        status="warning",
        found=f"{version}, and torch {torch.__version__} asks for {required}",
        consequence="modules on a GPU may not compile",
        remedy=remedy,
    )


def required_by_torch(package: str) -> SpecifierSet:
    """Return the versions of a package that torch's metadata require; an empty set of conditions if it names none."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("torch") or ())
    except importlib.metadata.PackageNotFoundError:  # torch was built in its source tree
        return SpecifierSet()
    return next((found.specifier for found in requirements if found.name == package), SpecifierSet())


def _check(package: str, version: str | None, *, consequence: str, remedy: str = "") -> Check:
    """Check that a package is installed, new enough for this library, and importable."""
    minimum = MINIMUM.get(package, "0")
    wanted = package if minimum == "0" else f"'{package}>={minimum}'"
    if version is None:
        found, remedy = "not installed", remedy or f"pip install {wanted}"
    elif Version(version) < Version(minimum):
        found, remedy = f"{version}, and {minimum} or newer is needed", f"pip install --upgrade {wanted}"
    else:
        try:
            importlib.import_module(package)
        except Exception as error:
            found = f"{version} cannot be imported: {said(error)}"
            remedy = remedy or f"fix the cause, or pip install --force-reinstall {wanted}"
        else:
            return Check(found=version)
    return Check(status="failed", found=found, consequence=consequence, remedy=remedy)
