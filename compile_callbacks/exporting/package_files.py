"""Where a package goes: paths that are checked before minutes of compiling."""

from __future__ import annotations

import errno
import os
import tempfile
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
