"""`CompileCache`: keeps Inductor's and Triton's own caches in a folder of the user while a run lasts."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compile_callbacks._utils.errors import with_code

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
    """Check the path of a folder, which need not exist, and return it as an absolute path.

    Args:
        argument: The argument's name, for messages.
        folder: The path; ``None`` for no folder.

    Raises:
        TypeError: It is not a path.
        ValueError: It is empty, or a file.
    """
    if folder is None:
        return None
    if not isinstance(folder, (str, os.PathLike)) or isinstance(name := os.fspath(folder), bytes):
        message = f"{argument}={folder!r} must be the path of a folder, not {type(folder).__name__}"
        raise TypeError(with_code("CC202", message))
    if not name:
        raise ValueError(with_code("CC401", f"{argument}={folder!r} must name a folder; '.' is the current one"))
    path = Path(name).expanduser().absolute()
    with contextlib.suppress(OSError):  # for a path that this user may not read, `begin` warns
        if path.exists() and not path.is_dir():
            raise ValueError(with_code("CC401", f"{argument}={folder!r} must be a folder, and is a file"))
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
            clean: Delete old entries if the folder is too large; for one rank of a run.
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


def delete_old_entries(folder: Path) -> None:
    """Delete the least recently used entries until both caches together take at most `MAX_BYTES`.

    An entry is a set of files that torch can use only together; it is deleted whole. Entries with files of another user
    are deleted in any case, because they would be loaded as code. Entries used within `KEPT_SECONDS` are kept. Links
    are not followed, and nothing outside of the two caches is touched.

    Args:
        folder: The folder that `CompileCache` uses.
    """
    entries = []
    for paths in _entries(folder):
        found = [stats for path in paths for stats in _stats_below(path)]
        if any(stats.st_uid not in (os.geteuid(), 0) for stats in found):
            _delete(paths)
            continue
        files = [stats for stats in found if not stat.S_ISDIR(stats.st_mode)]  # to list a directory is to access it
        last_used = max((max(stats.st_atime, stats.st_mtime) for stats in files), default=0.0)
        entries.append((last_used, sum(stats.st_size for stats in files), paths))
    excess_bytes = sum(size_bytes for _, size_bytes, _ in entries) - MAX_BYTES
    for last_used, size_bytes, paths in sorted(entries):
        if excess_bytes <= 0 or time.time() - last_used < KEPT_SECONDS:
            return
        _delete(paths)
        excess_bytes -= size_bytes


def _entries(folder: Path) -> Iterator[tuple[Path, ...]]:
    """The entries of both caches, each a directory, or the files that share a name up to its first dot."""
    for kernel in _children(folder / "triton"):
        yield (kernel,)
    for group in _children(folder / "inductor"):
        if group.name == "locks":  # empty files, which running processes hold
            continue
        if group.name == "fxgraph":  # fxgraph/xx/KEY
            yield from ((key,) for prefix in _children(group) for key in _children(prefix))
            continue
        by_stem: dict[str, list[Path]] = {}
        for path in _children(group):
            by_stem.setdefault(path.name.partition(".")[0], []).append(path)
        yield from map(tuple, by_stem.values())


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if not folder.is_symlink() else []
    except OSError:  # a file, or a folder that another process deleted
        return []


def _stats_below(path: Path) -> Iterator[os.stat_result]:
    """The status of a path and, for a directory, of everything in it."""
    with contextlib.suppress(OSError):  # another process deleted it
        yield (found := path.lstat())
        if stat.S_ISDIR(found.st_mode):
            for child in _children(path):
                yield from _stats_below(child)


def _delete(paths: tuple[Path, ...]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):  # another process deleted it
            if path.is_dir() and not path.is_symlink():
                # Renamed first, so that no process finds a part of it: Triton raises KeyError if a file is missing.
                doomed = path.with_name(f".{secrets.token_hex(8)}.deleted")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            else:
                path.unlink()
