"""Which version of a package is installed."""

from __future__ import annotations

import importlib.metadata


def installed_version(package: str) -> str | None:
    """The version of an installed package, by the name it is installed under; ``None`` where it is not installed.

    A package that runs from a source tree is not installed either.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
