"""Libraries that Inductor's C++ was compiled into: kept in torch's cache folder, and in no artifact of torch's."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from compile_callbacks import _torch


def loaded_libraries() -> dict[str, Path]:
    """The libraries out of torch's cache folder that this process has loaded, by their names in it."""
    folder, found = _torch.cache_folder(), {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")  # of its own: some modules import what is asked for
        if isinstance(file, str) and not file.endswith(".py") and (path := Path(file)).is_relative_to(folder):
            found[path.relative_to(folder).as_posix()] = path
    return found


def put_library(name: str, content: bytes) -> None:
    """Put a library into torch's cache folder, where none is of this name, which is made of its source.

    Raises:
        OSError: It cannot be written.
    """
    path = _torch.cache_folder() / name
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
