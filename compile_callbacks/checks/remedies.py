"""How to install what is missing, in the words of this system's package manager."""

from __future__ import annotations

import contextlib
import platform
import sys

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# The command of each family of Linux distributions, and what g++, gcc, Python's headers and OpenMP are called there.
_FAMILIES: dict[str, tuple[str, dict[str, str]]] = {
    "debian": ("apt-get install", {"python-headers": f"python{_PYTHON}-dev", "openmp": "libomp-dev"}),
    "fedora": ("dnf install", {"g++": "gcc-c++", "python-headers": f"python{_PYTHON}-devel", "openmp": "libomp-devel"}),
    "suse": ("zypper install", {"g++": "gcc-c++", "python-headers": "python3-devel", "openmp": "libomp-devel"}),
    "arch": ("pacman -S", {"g++": "gcc", "python-headers": "python", "openmp": "openmp"}),
    "alpine": ("apk add", {"python-headers": "python3-dev", "openmp": "openmp-dev"}),
}


def install(package: str) -> str:
    """The command that installs a package.

    Args:
        package: ``"g++"``, ``"gcc"``, ``"python-headers"`` or ``"openmp"``.
    """
    if platform.system() == "Darwin":
        return "brew install libomp" if package == "openmp" else "xcode-select --install"
    command, names = _FAMILIES[_family()]
    return f"{command} {names.get(package, package)}"


def _family() -> str:
    """The family that this system says it is of; where it says none, that of most containers."""
    with contextlib.suppress(OSError):
        release = platform.freedesktop_os_release()
        for name in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
            family = {"rhel": "fedora", "centos": "fedora", "opensuse": "suse"}.get(name, name)
            if family in _FAMILIES:
                return family
    return "debian"
