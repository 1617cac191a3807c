"""`CompileCache`: keeps Inductor's and Triton's own caches in a folder of the user's while a run lasts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 5 * 2**30
"""The size above which the least recently used entries are deleted at the start of a run."""

KEPT_SECONDS = 24 * 3600
"""Entries used within this time are never deleted: a running job may still read them.

Linux updates the access time of a file at most once a day (``relatime``), so a shorter time has no meaning.
"""

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

_active: list[CompileCache] = []  # the last one sets the environment
_environment_before: dict[str, str | None] = {}


def check_folder(argument: str, folder: object) -> Path | None:
    """The absolute path of a folder given as an argument. The folder need not exist.

    Args:
        argument: The argument's name, for messages.
        folder: The path; ``None`` for no folder.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a file.
    """
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)) or isinstance(named := os.fspath(folder), bytes):
        raise TypeError(f"{argument}={folder!r} must be the path of a folder, not {type(folder).__name__}")
    if not named:
        raise ValueError(f"{argument}={folder!r} must name a folder; '.' is the current one")
    path = Path(named).expanduser().absolute()
    with contextlib.suppress(OSError):  # if nobody may look there, using the folder warns
        if path.exists() and not path.is_dir():
            raise ValueError(f"{argument}={folder!r} must be a folder, and is a file")
    return path


class CompileCache:
    """Points ``TORCHINDUCTOR_CACHE_DIR`` and ``TRITON_CACHE_DIR`` at a folder, from `begin` to `end`.

    Compiled code in the folder is loaded and run, so the folder must belong to this user, and nobody else may be able
    to write to it. A folder that cannot be used costs the cache, not the run.

    Args:
        folder: The folder. `begin` creates it, readable by its owner only.
        warn: Takes a message if the folder cannot be used.
    """

    def __init__(self, folder: Path, warn: Callable[[str], object]) -> None:
        self.folder = folder
        self._warn = warn

    @property
    def active(self) -> bool:
        """Whether torch uses the folder now."""
        return self in _active

    def begin(self, *, clean: bool = True) -> None:
        """Start to use the folder.

        Args:
            clean: Delete old entries if the folder is too large. One rank of a run does.
        """
        if self.active:
            return
        try:
            _make_private(self.folder)
            for name in _FOLDERS.values():
                _make_private(self.folder / name, follow_links=False)
            if clean:
                delete_old_entries(self.folder)
        except OSError as error:
            self._warn(f"cache_dir={str(self.folder)!r} is not used, nothing is cached there: {error}")
            return
        if not _active:
            _environment_before.update({variable: os.environ.get(variable) for variable in _FOLDERS})
        _active.append(self)
        _set_environment()

    def end(self) -> None:
        """Stop using the folder, and restore the environment variables. Safe to call twice."""
        if self.active:
            _active.remove(self)
            _set_environment()


def _set_environment() -> None:
    for variable, name in _FOLDERS.items():
        value = str(_active[-1].folder / name) if _active else _environment_before.pop(variable)
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def _make_private(folder: Path, *, follow_links: bool = True) -> None:
    """Create a folder if it is missing, and refuse one that another user could write compiled code to.

    Raises:
        OSError: The folder cannot be created, or is refused.
    """
    if not hasattr(os, "geteuid"):
        raise PermissionError("this platform does not report the owner of a file, and cached code would be run")
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    found = folder.stat() if follow_links else folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is a symbolic link or a file, not a folder")
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user ({found.st_uid}), who could put code there")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write code to {folder}; `chmod go-w {folder}` prevents that")


# ---------------------------------------------------------------------------------------------- cleaning


@dataclass(frozen=True)
class _Entry:
    """Files that the cache can use only together: a kernel's directory, or a C++ source and its library."""

    paths: tuple[Path, ...]
    size_bytes: int
    last_used: float
    foreign: bool  # a file of it belongs to another user


def delete_old_entries(folder: Path) -> None:
    """Delete the least recently used entries until the caches take at most `MAX_BYTES`.

    Entries with files of another user are deleted first: they would be loaded as code. Links are not followed, and
    nothing outside of the two cache folders is touched. Entries used within `KEPT_SECONDS` are kept.

    Args:
        folder: The folder that `CompileCache` uses.
    """
    entries = [_described(paths) for paths in _entries(folder)]
    for entry in entries:
        if entry.foreign:
            _delete(entry)
    kept = sorted((entry for entry in entries if not entry.foreign), key=lambda entry: entry.last_used)
    excess_bytes = sum(entry.size_bytes for entry in kept) - MAX_BYTES
    for entry in kept:
        if excess_bytes <= 0 or time.time() - entry.last_used < KEPT_SECONDS:
            return
        _delete(entry)
        excess_bytes -= entry.size_bytes


def _entries(folder: Path) -> Iterator[tuple[Path, ...]]:
    """The entries of both caches, each a directory or the files that share a name up to its first dot."""
    for kernel in _children(folder / "triton"):
        yield (kernel,)
    for group in _children(folder / "inductor"):
        if group.name == "locks":  # empty files, which running processes hold
            continue
        if group.name == "fxgraph":  # fxgraph/xx/KEY
            for prefix in _children(group):
                yield from ((key,) for key in _children(prefix))
            continue
        by_stem: dict[str, list[Path]] = {}
        for path in _children(group):
            by_stem.setdefault(path.name.partition(".")[0], []).append(path)
        yield from map(tuple, by_stem.values())


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if not folder.is_symlink() else []
    except OSError:  # a file, or deleted by another process
        return []


def _described(paths: tuple[Path, ...]) -> _Entry:
    size_bytes, last_used, foreign = 0, 0.0, False
    for path in paths:
        for name in (path, *_below(path)):
            with contextlib.suppress(OSError):  # another process was first
                found = name.lstat()
                foreign |= found.st_uid not in (os.geteuid(), 0)
                if not stat.S_ISDIR(found.st_mode):  # listing a directory updates its access time
                    size_bytes += found.st_size
                    last_used = max(last_used, found.st_atime, found.st_mtime)
    return _Entry(paths, size_bytes, last_used, foreign)


def _below(path: Path) -> Iterator[Path]:
    if path.is_dir() and not path.is_symlink():
        for parent, folders, files in os.walk(path):
            yield from (Path(parent, name) for name in (*folders, *files))


def _delete(entry: _Entry) -> None:
    for path in entry.paths:
        with contextlib.suppress(OSError):  # another process was first
            if path.is_dir() and not path.is_symlink():
                # Renamed first, so that no other process finds half of it: Triton raises KeyError if a file is missing.
                doomed = path.with_name(f".{secrets.token_hex(8)}.deleted")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                path.unlink()
