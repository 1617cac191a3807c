"""Where a package goes: paths that are checked, and a file that appears when it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compile_callbacks.links import checks_settings


@checks_settings
def check_path(path: object) -> Path:
    """The path of a package.

    Raises:
        TypeError: No path.
        ValueError: Another ending than ``.pt2``.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} must be a path, not {type(path).__name__}")
    found = Path(path)
    if found.suffix != ".pt2":
        raise ValueError(f"path={str(found)!r} must end in '.pt2'")
    return found


@contextlib.contextmanager
def appears_whole(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place in the end, and is gone where it does not come to that."""
    beside = path.with_name(f".{path.stem}.{os.getpid()}.pt2")
    check_writable(path)  # before minutes of compiling
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuse a path that no file can be written to, and make the folders on the way that are missing.

    Raises:
        OSError: The system's reason.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "path is a folder", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"path cannot be written: {error.strerror}", str(path)) from error
