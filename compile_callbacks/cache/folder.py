"""What ``cache_dir`` contains: the caches of Inductor and Triton (`use_cache`), and a small file for each model."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compile_callbacks._utils.device import device_name
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.files import digest, installed_version, read_json, write_json
from compile_callbacks._utils.messages import check_type
from compile_callbacks.passes.base import pass_identity

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

_SAFE = r"[\w./+@:,=-]+"  # torch passes the paths of its files to the C++ compiler without quotes

_folders: list[Path] = []  # the last one sets the environment
_environment_before: dict[str, str | None] = {}


def check_cache_dir(folder: Any) -> Path | None:
    """Check the path of a ``cache_dir``, which need not exist, and return it as an absolute path."""
    if folder is None:
        return None
    check_type("cache_dir", folder, (str, os.PathLike), "the path of a folder")
    if not os.fspath(folder):
        raise ValueError(with_code("CC401", f"cache_dir={folder!r} must name a folder; '.' is the current folder"))
    return Path(folder).expanduser().absolute()


def use_cache(folder: Path, undo: contextlib.ExitStack) -> str | None:
    """Point ``TORCHINDUCTOR_CACHE_DIR`` and ``TRITON_CACHE_DIR`` at a folder until ``undo``, or return why not."""
    try:
        if not re.fullmatch(_SAFE, str(folder)):
            raise OSError("torch passes paths to the C++ compiler without quotes, so use letters, digits and ._/-")
        _make_private(folder.resolve())
        for name in _FOLDERS.values():
            _make_private(folder / name)
            with tempfile.TemporaryFile(dir=folder / name) as file:
                file.write(b"0")
    except OSError as error:
        return f"cache_dir={str(folder)!r} is not used, and no code is cached there: {error}"
    if not _folders:
        _environment_before.update({variable: os.environ.get(variable) for variable in _FOLDERS})
    _folders.append(folder)
    _set_environment()
    undo.callback(_set_environment)
    undo.callback(_folders.remove, folder)  # called first
    return None


def _set_environment() -> None:
    for variable, name in _FOLDERS.items():
        value = str(_folders[-1] / name) if _folders else _environment_before.pop(variable)
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def _make_private(folder: Path) -> None:
    """Create a folder if it is missing, and refuse one that others could write to, because torch runs its code."""
    if not hasattr(os, "geteuid"):
        raise PermissionError("this platform does not report the owner of a file, so cached code is not safe to run")
    folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is a symbolic link or a file, not a folder")
    if status.st_uid not in (os.geteuid(), 0):
        raise PermissionError(f"{folder} belongs to another user ({status.st_uid}), who could write code there")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users can write code to {folder}; `chmod go-w {folder}` prevents that")


# ------------------------------------------------------------------------------------------ the file of a model

VERSION = 1

_SECTIONS = ("winners", "shapes")
_MAX_ENTRIES = 50  # in each section, so that a new batch size in each run does not fill the file


@dataclass(eq=False)
class ModelRecord:
    """One JSON file for a model. A file that is missing, damaged or of another version counts as empty.

    - ``"winners"``: for each set of conditions, the winner of a `Tune`.
    - ``"shapes"``: for each phase and target, the input dimensions that vary, and facts about backward passes.
    """

    path: Path
    facts: Mapping[str, str]  # about the run, on which the winner of a `Tune` depends
    read_only: bool = False

    def load(self) -> dict[str, Any]:
        """Read the version and the sections of the file, without values of the wrong type."""
        data = read_json(self.path)
        known = data if isinstance(data, dict) and data.get("version") == VERSION else {}
        sections = {name: section if isinstance(section := known.get(name), dict) else {} for name in _SECTIONS}
        values = {name: {key: v for key, v in each.items() if isinstance(v, dict)} for name, each in sections.items()}
        return {"version": VERSION, **values}

    def update(self, section: str, key: str, value: Any) -> str | None:
        """Write one value if it is new. Return the reason why it could not be written, or ``None``."""
        if self.read_only:
            return None
        record = self.load()
        entries = record[section]
        if entries.pop(key, None) == value:
            return None
        entries[key] = value
        record[section] = dict(list(entries.items())[-_MAX_ENTRIES:])
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_json(self.path, record, mode=0o600)
        except (OSError, TypeError, ValueError) as error:  # JSON raises the last two if it does not support a value
            return f"{type(error).__name__}: {error}"
        return None


def model_fingerprint(module: nn.Module) -> str:
    """Return a hash of a module's structure, and of the names, shapes and dtypes of its weights, for each process."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    texts = [f"{name}: {tensor.dtype}" for name, tensor in tensors]
    with contextlib.suppress(Exception):  # a lazy weight or a nested tensor has no shape
        texts += [str(tuple(tensor.shape)) for _, tensor in tensors]
    with contextlib.suppress(Exception):  # the user's code describes the module
        texts.append(re.sub(" at 0x[0-9a-f]+", "", repr(module)))
    return digest(texts)


def facts_of_run(
    model: str, targets: Sequence[str], passes: Sequence[Any], precision: str, device: torch.device, ranks: int
) -> dict[str, str]:
    """Return the facts about a run that may change which config is the fastest."""
    return {
        "compile-callbacks": installed_version("compile-callbacks") or "none",
        "device": device_name(device),
        "threads": str(torch.get_num_threads()) if device.type == "cpu" else "",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "model": model,
        "passes": ", ".join(pass_identity(graph_pass) for graph_pass in passes),
        "precision": precision,
        "ranks": str(ranks),
        "targets": ", ".join(targets),
        "torch": str(torch.__version__),
        "triton": installed_version("triton") or "none",
    }
