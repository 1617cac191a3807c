"""`WarmStart`: what a module's compiles leave in torch's caches, kept in a folder for the next run or machine.

Torch's own artifacts hold graphs and Triton kernels. Kernels for a CPU they hold as source, whose compiling is nearly
all that a start takes there: so the libraries that were loaded are kept with them.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks.compiling.once import WarnOnce
from compile_callbacks.devices.placement import device_of
from compile_callbacks.links import Entry
from compile_callbacks.phases import Phase
from compile_callbacks.settings.tune import Settings
from compile_callbacks.warm_start.artifact_file import SEVERAL_PER_KEY, Artifact
from compile_callbacks.warm_start.artifacts import ArtifactError, ArtifactStore
from compile_callbacks.warm_start.artifacts_key import artifacts_key
from compile_callbacks.warm_start.libraries import loaded_libraries, probe_libraries, put_library

_LIBRARY = "library"

STEPS_TO_SETTLE = 5
"""Steps in which nothing compiles after which a phase's last compile is taken to be done, and is kept."""

_WRITING_PART = 0.01  # of a run's time, at most, may go into files that are written between its steps

_live: weakref.WeakSet[WarmStart] = weakref.WeakSet()  # whose run is under way
_recorded_before: set[tuple[str, str]] = set()  # graphs that this process has compiled or loaded, by kind and key


class WarmStart:
    """Loads what earlier runs compiled of a module before this one compiles, and keeps what this one compiles.

    Args:
        folder: Where artifacts are kept.
        configs: The module's settings by phase.
        passes: Graph passes for both phases.
        targets: Names of what is compiled of it.
        warn: Takes what there is to warn of; a subject, a message, and its entry in the docs.
    """

    def __init__(
        self,
        folder: Path,
        configs: Mapping[Phase, Settings],
        passes: Sequence[Any] = (),
        targets: Sequence[str] = (),
        warn: Callable[[Hashable, str, Entry], object] | None = None,
    ) -> None:
        self._store = ArtifactStore(folder)
        self._settings = dict(configs), tuple(passes), tuple(targets)
        self._key: str | None = None
        self._writes = True
        self._device = torch.device("cpu")
        self._loaded_bytes = self._saved_bytes = 0
        self._seen = 0
        self._libraries: set[str] = set()
        self._used: dict[Any, Artifact] = {}
        self._kept: set[Any] = set()
        self._quiet_steps: int | None = None  # since something compiled that is not kept yet
        self._not_before = 0.0
        self._told: str | None = None  # why the folder is not read, which is why it is not written either
        self._warn_of = warn or WarnOnce()

    @property
    def loaded(self) -> bool:
        """Whether anything was there to be loaded."""
        return self._loaded_bytes > 0

    @property
    def idle(self) -> bool:
        """Whether there was nothing to load, and there is nothing to keep."""
        return not self._loaded_bytes and not self._used

    def report(self) -> dict[str, Any] | None:
        """What was loaded and saved, as plain data: the file, and sizes in MiB; ``None`` before the first run."""
        if self._key is None:
            return None
        return {
            "path": str(self._store.path(self._key)),
            "loaded_mb": self._loaded_bytes / 2**20,
            "saved_mb": self._saved_bytes / 2**20,
        }

    def begin(self, module: nn.Module, gather: Callable[[Any], Sequence[Any]] = lambda own: [own]) -> None:
        """A run begins: what is compiled from here on is the module's. The first time, load.

        Args:
            module: The module.
            gather: Gives what each process knows: of those with the same key the one of lowest rank writes.
        """
        self._record_anew()
        if self._key is None:
            self._device = device_of(module)
            self._key = artifacts_key(module, *self._settings, self._device)
            self._load(self._key)
        rank, of_ranks = _rank(), gather((_rank(), self._key))
        if len(of_ranks) > 1:
            self._writes = rank == min(other for other, key in of_ranks if key == self._key)
        else:  # alone, or one of several that do not meet: on GPUs each of the first machine has its own by the index
            self._writes = rank is None or rank == (self._device.index or 0)

    def _load(self, key: str) -> None:
        try:
            artifacts = self._store.load(key)
        except ArtifactError as error:
            self._told = str(error)
            self._warn(f"kept compile artifacts are ignored: {error}", "artifacts-are-ignored")
            return
        failure = None
        for artifact in artifacts:
            try:
                _put(artifact)
            except Exception as error:  # a full disk, or what this build of torch knows nothing of
                failure = f"{type(error).__name__}: {error}"
            else:
                self._kept.add(artifact.place)
                self._loaded_bytes += len(artifact.content)
        if failure is not None:
            message = f"kept compile artifacts could not all be put into torch's cache folder: {failure}"
            self._warn(message, "artifacts-are-ignored")

    def step_ends(self, *, compiled: bool) -> None:
        """A step is done: `STEPS_TO_SETTLE` after something compiled, keep it; a run may be killed in its first epoch.

        Args:
            compiled: Whether anything compiled in the step.
        """
        if compiled:
            self._quiet_steps = 0
        elif self._quiet_steps is not None:
            self._quiet_steps += 1
            if self._quiet_steps >= STEPS_TO_SETTLE and (started := time.monotonic()) >= self._not_before:
                self.save()
                ended = time.monotonic()
                self._not_before = ended + (ended - started) / _WRITING_PART

    def end(self) -> None:
        """The run is over: what is compiled from here on is not the module's."""
        self.save()
        _live.discard(self)

    def save(self) -> None:
        """Keep what was compiled, if anything was that is not kept yet."""
        self._quiet_steps = None
        self._collect()
        if self._key is None or self._used.keys() <= self._kept or not self._writes:
            return
        # Where this fails it is not tried again before something else is compiled.
        self._kept |= self._used.keys()
        try:
            written = self._store.save(self._key, list(self._used.values()))
        except ArtifactError as error:
            if str(error) != self._told:
                self._warn(f"compile artifacts are not kept: {error}", "artifacts-are-not-kept")
            return
        self._saved_bytes = written.size_bytes
        if written.left_out:
            message = f"{written.left_out} compile artifacts are not kept: the file is as large as the folder may be"
            self._warn(message, "artifacts-are-not-kept")

    def _record_anew(self) -> None:
        """Have torch record what is used from here on, also what it has recorded for others, which they take before."""
        for other in tuple(_live):
            other._collect()
            other._seen = 0
        _live.add(self)
        recorded, _ = _torch.recorded_artifacts(0)
        _recorded_before.update((kind, key) for kind, key, _ in recorded if kind in SEVERAL_PER_KEY)
        _torch.record_artifacts_again()
        self._seen, self._libraries = 0, set(loaded_libraries())

    def _collect(self) -> None:
        recorded, self._seen = _torch.recorded_artifacts(self._seen)
        artifacts = [Artifact(*entry) for entry in recorded]
        if self._device.type == "cpu":
            if any(a[:2] in _recorded_before and a.place not in self._used for a in artifacts):
                # A graph that this process has loaded for somebody else: nothing tells which libraries it uses.
                self._libraries = set()
            artifacts += self._new_libraries()
        self._used |= {artifact.place: artifact for artifact in artifacts}

    def _new_libraries(self) -> Iterator[Artifact]:
        loaded = loaded_libraries()
        new = {name: loaded[name] for name in sorted(loaded.keys() - self._libraries)}
        self._libraries |= loaded.keys()
        for name, path in (new | probe_libraries()).items() if new else ():
            with contextlib.suppress(OSError):  # somebody cleaned up torch's cache folder
                yield Artifact(_LIBRARY, name, path.read_bytes())

    def _warn(self, message: str, entry: Entry) -> None:
        self._warn_of(("cache_dir", message), message, entry)


def _rank() -> int | None:
    """This process's number among those of a run; ``None`` where it is alone."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK")
    return int(rank) if rank else None


def _put(artifact: Artifact) -> None:
    if artifact.kind == _LIBRARY:
        put_library(artifact.key, artifact.content)
    else:
        _torch.put_into_cache(*artifact[:3])
