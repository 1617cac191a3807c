"""Writes files atomically, reads, writes and hashes JSON-ready data, and finds the versions of packages."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file replaces ``path`` if the block succeeds, and is deleted if the block fails."""
    # Several processes can write at once: each has its own temporary file, and the file of the last process remains.
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # in a read-only folder, the error of unlink would hide the first error
            temporary.unlink(missing_ok=True)


def write_json(path: Path, data: Any, *, mode: int = 0o666) -> None:
    """Write JSON-ready data to a file with these permissions, atomically."""
    text = json.dumps(data, indent=2) + "\n"
    with atomic_write(path) as temporary:
        temporary.touch(mode)
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Return the data of a JSON file, which anyone may have written, or ``None`` if it is missing or damaged."""
    try:
        # Opens regular files only, because opening a named pipe would wait for its writer.
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):  # thousands of nested brackets raise RecursionError
        return None


def digest(data: Any) -> str:
    """Return a hash of JSON-ready data. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def installed_version(package: str) -> str | None:
    """Return the version of an installed distribution, or ``None`` if Python imports it from a source tree."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
