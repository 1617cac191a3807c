"""`ArtifactStore`: a folder of files of compile artifacts, each of which loads as it was written or not at all.

What is in a file is code to whoever loads it. So a file is taken only from where nobody else can have put it, and
opened once: what was checked is what is read.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compile_callbacks.files.whole_files import ABANDONED_SECONDS
from compile_callbacks.warm_start.artifact_file import Artifact, pack, unpack

SUFFIX = ".artifacts"
"""How the names of the files end."""

_DEFAULT_LIMIT_MB = 2048
_MOST_UNUSED_RUNS = 4
_OWN_FILE = re.compile(r"[0-9a-f]{32}\.artifacts|\.[0-9a-f]{32}\.\d+\.[0-9a-f]{8}\.tmp")

_UNLOCKED_SECONDS = 5  # a writer locks its file at once


class ArtifactError(Exception):
    """Why a file is not loaded, or not written, in a line."""


class Written(NamedTuple):
    """What a write came to.

    Attributes:
        size_bytes: The size of the file.
        left_out: How many of the artifacts did not fit into the limit.
    """

    size_bytes: int
    left_out: int


class ArtifactStore:
    """A folder of artifact files, one for each key; safe with many processes that read and write at once.

    A file is replaced as a whole: of writers at the same moment the last one wins. It then holds that writer's
    artifacts and, behind them, those of the file it found, unless several runs in a row had no use for them: what was
    compiled of code that has changed since would else only add up.

    Args:
        folder: The folder; made, for its owner alone, when first written to.
        limit_mb: The most that the files may take together, in MiB; those that were loaded longest ago go first.

    Raises:
        TypeError: ``folder`` is no path, or ``limit_mb`` no number.
        ValueError: ``folder`` is a file, or ``limit_mb`` not above 0.

    Example::

        >>> import tempfile
        >>> store = ArtifactStore(Path(tempfile.mkdtemp()) / "artifacts")
        >>> store.save("1f3a", [Artifact("inductor", "graph", b"code")]).left_out
        0
        >>> store.load("1f3a")
        [Artifact(kind='inductor', key='graph', content=b'code', unused_runs=0)]
    """

    def __init__(self, folder: str | os.PathLike[str], *, limit_mb: float = _DEFAULT_LIMIT_MB) -> None:
        if isinstance(limit_mb, bool) or not isinstance(limit_mb, (int, float)):
            raise TypeError(f"limit_mb={limit_mb!r} must be a number of MiB")
        if not 0 < limit_mb < float("inf"):
            raise ValueError(f"limit_mb={limit_mb!r} must be above 0 and finite")
        self.folder: Path = _as_folder("folder", folder)
        self._limit_bytes = int(limit_mb * 2**20)
        self._written: set[str] = set()

    def path(self, key: str) -> Path:
        """Where the artifacts of a key are kept."""
        return self.folder / (key + SUFFIX)

    def load(self, key: str) -> list[Artifact]:
        """The artifacts of a key, those used last first; none where there is no file.

        Raises:
            ArtifactError: There is one, and it is damaged, of another version, not to be trusted or not to be read.
        """
        with self._errors_told(key), self._opened_folder() as folder:
            return [] if folder is None else self._read(folder, key)

    def save(self, key: str, artifacts: Sequence[Artifact]) -> Written:
        """Write the artifacts of a key, before what its file holds already.

        Args:
            key: The key.
            artifacts: The artifacts, the most useful first.

        Raises:
            ArtifactError: The folder is not to be trusted, or the file cannot be written.
        """
        with self._errors_told(key):
            if not self.folder.is_dir():
                self.folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
            with self._opened_folder() as folder:
                if folder is None:
                    raise ArtifactError(f"{self.folder} went away")
                kept, left_out = self._fitting(artifacts, self._earlier(folder, key))
                size = self._replace(folder, key, kept)
                self._written.add(key)
                self._make_room(folder, key)
                return Written(size, left_out)

    # ------------------------------------------------------------------------------------------ reading

    def _read(self, folder: int, key: str) -> list[Artifact]:
        try:
            # Without waiting for somebody at the other end of a pipe; and a link is none of ours.
            file = os.open(key + SUFFIX, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return []
        except OSError:
            if stat.S_ISLNK(os.stat(key + SUFFIX, dir_fd=folder, follow_symlinks=False).st_mode):
                raise ArtifactError(f"{self.path(key)} is a symbolic link, and no file that was written here") from None
            raise
        with os.fdopen(file, "rb") as stream:
            self._check_file(self.path(key), os.fstat(file))
            try:
                artifacts = unpack(stream.read(), key)
            except (ValueError, KeyError, TypeError) as error:
                raise ArtifactError(f"{self.path(key)}: {error}") from error
            with contextlib.suppress(OSError):  # a folder that is mounted to be read alone
                os.utime(file)
        return artifacts

    def _earlier(self, folder: int, key: str) -> list[Artifact]:
        """What the file holds that is to be replaced, a run older unless this run has written it already."""
        try:
            found = self._read(folder, key)
        except (ArtifactError, OSError):
            return []
        if key in self._written:
            return found
        older = [artifact._replace(unused_runs=artifact.unused_runs + 1) for artifact in found]
        return [artifact for artifact in older if artifact.unused_runs <= _MOST_UNUSED_RUNS]

    @contextlib.contextmanager
    def _opened_folder(self) -> Iterator[int | None]:
        """The folder as a descriptor, for which a path that is exchanged later on makes no difference."""
        if not hasattr(os, "geteuid") or os.open not in os.supports_dir_fd:
            raise ArtifactError("this platform does not tell whose file it is, and loading one runs code")
        try:
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield None
            return
        try:
            self._check_folder(os.fstat(folder))
            yield folder
        finally:
            os.close(folder)

    def _check_folder(self, found: os.stat_result) -> None:
        if found.st_uid not in (os.geteuid(), 0):
            raise ArtifactError(
                f"{self.folder} belongs to another user ({found.st_uid}), who could put code there; take a folder of "
                "your own"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ArtifactError(
                f"others than its owner can write to {self.folder}, and so put code there that would be run; "
                f"chmod go-w {self.folder} mends it"
            )

    def _check_file(self, path: Path, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactError(f"{path} is no regular file")
        if found.st_uid != os.geteuid():
            raise ArtifactError(
                f"{path} belongs to another user ({found.st_uid}), whose code it would run; what this run compiles "
                "takes its place"
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ArtifactError(f"others than its owner can write to {path}; what this run compiles takes its place")

    # ------------------------------------------------------------------------------------------ writing

    def _fitting(self, artifacts: Sequence[Artifact], earlier: Sequence[Artifact]) -> tuple[list[Artifact], int]:
        """What goes into a file, artifacts before those of earlier; and how many of the former do not fit."""
        kept: dict[Any, Artifact] = {}
        size = left_out = 0
        for number, artifact in enumerate((*artifacts, *earlier)):
            place = artifact.place
            if place in kept:
                continue
            if size + len(artifact.content) <= self._limit_bytes:
                kept[place] = artifact
                size += len(artifact.content)
            else:
                left_out += number < len(artifacts)
        return list(kept.values()), left_out

    def _replace(self, folder: int, key: str, artifacts: Sequence[Artifact]) -> int:
        beside = f".{key}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(beside, flags, stat.S_IRUSR | stat.S_IWUSR, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                _lock(file)  # given back when the process ends, however it does
                for part in pack(artifacts, key):
                    stream.write(part)
                stream.flush()
                os.fsync(file)
                size = stream.tell()
            os.replace(beside, key + SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside, dir_fd=folder)
            raise
        return size

    def _make_room(self, folder: int, key: str) -> None:
        """Remove what killed writers left, and the files that were loaded longest ago where all are too large."""
        files = []
        for name in os.listdir(folder):
            if not _OWN_FILE.fullmatch(name):  # the folder may hold other people's work
                continue
            with contextlib.suppress(OSError):  # another process was first
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
                if name.endswith(SUFFIX):
                    files.append((name != key + SUFFIX, -found.st_mtime, found.st_size, name))
                elif _is_abandoned(folder, name, time.time() - found.st_mtime):
                    os.unlink(name, dir_fd=folder)
        size = 0
        for may_go, _, size_bytes, name in sorted(files):
            size += size_bytes
            if may_go and size > self._limit_bytes:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)

    @contextlib.contextmanager
    def _errors_told(self, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArtifactError(f"{self.path(key)}: {error.strerror or error}") from error


def _lock(file: int) -> bool:
    """Whether nobody else held the file's lock; it is held from now on, until the file is closed."""
    import fcntl  # not on Windows, where nothing is written

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held; or a file system without locks
        return False
    return True


def _is_abandoned(folder: int, name: str, age_seconds: float) -> bool:
    """Whether a file that was to take another's place is one that a killed writer left."""
    if age_seconds > ABANDONED_SECONDS or age_seconds < _UNLOCKED_SECONDS:
        return age_seconds > ABANDONED_SECONDS
    file = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        return _lock(file)
    finally:
        os.close(file)


def check_folder(argument: str, folder: object) -> Path | None:
    """The path of a folder that an argument names, whether it is there or not; ``None`` for ``None``.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, or there is a file.
    """
    return None if folder is None else _as_folder(argument, folder)


def _as_folder(argument: str, folder: object) -> Path:
    if not isinstance(folder, (str, os.PathLike)) or isinstance(named := os.fspath(folder), bytes):
        raise TypeError(f"{argument}={folder!r} must be the path of a folder, not {type(folder).__name__}")
    if not named:
        raise ValueError(f"{argument}={folder!r} must name a folder; '.' is the one you are in")
    path = Path(named).expanduser().absolute()
    with contextlib.suppress(OSError):  # where nobody may look, using it says so, and costs the cache alone
        if path.exists() and not path.is_dir():
            raise ValueError(f"{argument}={folder!r} must be a folder, and is a file")
    return path
