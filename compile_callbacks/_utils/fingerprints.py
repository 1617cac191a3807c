"""Hashes of data, and versions of installed packages, for the keys of saved results."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from typing import Any


def digest(data: Any) -> str:
    """Return a hash of JSON-ready data. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or ``None`` if Python imports it from a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
