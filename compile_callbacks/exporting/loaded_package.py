"""`load_exported`: a package as a callable; and the trial of a new package in another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks.exporting.call_spec import CallSpec

Format = Literal["aoti", "export"]
"""The content of a ``.pt2`` file: compiled code, or the program of ``torch.export``."""

SPEC_KEY = "compile_callbacks"
"""The key of our entry in a package's metadata."""

_PATIENCE_SECONDS = 300
_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}
_AOTI_FOLDER = "data/aotinductor/model/"
_PROGRAM = "models/model.json"


class ExportError(RuntimeError):
    """A module cannot be exported, or a package cannot be loaded; the message says why."""


class ExportedModule:
    """A package that is called like the exported module.

    Attributes:
        path: Its file.
        format: What the file holds.
        device: The type of the device that it runs on.
        torch_version: The version of torch that wrote it.
        spec: Its inputs.
    """

    def __init__(
        self,
        path: Path,
        format: Format,  # noqa: A002
        run: Callable[..., Any],
        *,
        device: str,
        torch_version: str,
        spec: CallSpec,
    ) -> None:
        self.path = path
        self.format = format
        self.device = device
        self.torch_version = torch_version
        self.spec = spec
        self._run = run
        self.__signature__ = spec.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package.

        Raises:
            TypeError: Inputs are missing, or too many, or of another dtype or kind than at the export.
            ValueError: An input of another shape, on another device, or with another value than at the export.
        """
        bound = self.spec.bind(args, kwargs)
        tensors = self.spec.tensors(bound)
        if self.format == "aoti":
            return self._run(tensors)
        with torch.no_grad():
            return self._run(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        return (
            f"ExportedModule({str(self.path)!r}, format={self.format!r}, device={self.device!r}, inputs=({self.spec}))"
        )


def load_exported(path: str | os.PathLike[str]) -> ExportedModule:
    """Load a package that `export` wrote.

    The whole file is read once to compare its checksums, because torch loads damaged code without an error. Do not load
    a package that you do not trust: it contains code.

    Args:
        path: A ``.pt2`` file of either format.

    Returns:
        A callable that takes the arguments of the module's ``forward``, by position or by name, and checks them: a
        tensor of another shape, dtype or device is an error here, and gives wrong numbers in AOTInductor's code.

    Raises:
        FileNotFoundError: There is no such file.
        ExportError: The file is no package, is damaged, was not written by `export`, is for a device that is not
            available, or cannot be loaded by this torch.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r} does not exist")
    names, metadata = read_package(path)
    spec = read_spec(path, metadata)
    made_by, device = str(metadata.get("torch")), str(metadata.get("device", "cpu"))
    if not _has(device):
        raise ExportError(f"{path} was exported for a {device} device, and none is available")
    is_compiled = any(_AOTI_FOLDER in name for name in names)
    try:
        run = _torch.export.load_package(str(path)) if is_compiled else _torch.export.load_program(str(path))
    except Exception as error:
        versions = f"torch {made_by} wrote it, and this is {torch.__version__}"
        reason = in_one_line(describe_failure(error))
        raise ExportError(f"{path} cannot be loaded by this torch ({versions}): {reason}") from error
    return ExportedModule(
        path, "aoti" if is_compiled else "export", run, device=device, torch_version=made_by, spec=spec
    )


def read_package(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The names of a package's entries, and its metadata.

    Raises:
        ExportError: The file is no package, is damaged, or was not written by `export`.
    """
    if not zipfile.is_zipfile(path):
        raise ExportError(f"{path} is no .pt2 package, or the end of it is missing")
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ExportError(f"{path} is damaged: {damaged.rpartition('/')[2]} does not match its checksum")
            names = archive.namelist()
            if not any(_AOTI_FOLDER in name or name.endswith(_PROGRAM) for name in names):
                raise ExportError(f"{path} is no .pt2 package: it holds no exported program and no compiled one")
            metadata = _metadata(archive, names)
    except ExportError:
        raise
    # RuntimeError: an encrypted file, a compression that Python does not know, or JSON that is nested too deeply.
    except (zipfile.BadZipFile, zlib.error, ValueError, OSError, RuntimeError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error
    if metadata is None:
        raise ExportError(
            f"{path} was not written by compile_callbacks.export; load it with torch._inductor.aoti_load_package or "
            "torch.export.load"
        )
    return names, metadata


def read_spec(path: Path, metadata: Mapping[str, Any]) -> CallSpec:
    """The inputs of a package, from its metadata.

    Raises:
        ExportError: This version of the library cannot read the description of the inputs.
    """
    try:
        return CallSpec.from_json(metadata["inputs"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = in_one_line(describe_failure(error))
        raise ExportError(
            f"{path} describes its inputs as this version of compile_callbacks cannot read them, because another one "
            f"wrote them or they are damaged: {reason}"
        ) from error


def _metadata(archive: zipfile.ZipFile, names: list[str]) -> dict[str, Any] | None:
    """The metadata that `export` wrote; ``None`` if there is none."""
    extra = next((name for name in names if name.endswith(f"extra/{SPEC_KEY}")), None)
    wrapper = next((name for name in names if name.endswith("wrapper_metadata.json")), None)
    text: Any = None
    if extra is not None:
        text = archive.read(extra)
    elif wrapper is not None:
        of_torch = json.loads(archive.read(wrapper))
        if not isinstance(of_torch, dict):
            raise ValueError("its metadata is no mapping")
        text = of_torch.get(SPEC_KEY)
    if text is None:
        return None
    data = json.loads(text) if isinstance(text, (str, bytes)) else None
    if not isinstance(data, dict) or "inputs" not in data:
        raise ValueError("its metadata does not describe the inputs")
    return data


def _has(device: str) -> bool:
    if device == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device and torch.accelerator.is_available()


# ------------------------------------------------------------------------------------------ the trial


def load_after_trial(
    path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> ExportedModule:
    """Load a new package; another process runs a package for a GPU first.

    That takes seconds, because the process imports torch. On a GPU, a crash is more likely, because AOTInductor writes
    more C++ code to launch kernels, and worse: after an invalid memory access, the process cannot use the GPU any more.

    Args:
        path: The package.
        args: Inputs by position.
        kwargs: Inputs by name.
        device: Where it runs.

    Raises:
        ExportError: The package crashed, or cannot be loaded.
    """
    if device.type != "cpu":
        try_in_new_process(path, args, kwargs)
    return load_exported(path)


def try_in_new_process(path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Run a package once in a new process.

    Args:
        path: The package.
        args: Inputs by position.
        kwargs: Inputs by name.

    Returns:
        Whether the process succeeded. An error that is not a crash is not the package's fault as far as is known: the
        process that loads the package raises the same error, with more details.

    Raises:
        ExportError: The package crashed, or did not end in time.
    """
    _, metadata = read_package(path)
    spec = read_spec(path, metadata)
    with tempfile.TemporaryDirectory() as folder:
        tensors = Path(folder, "inputs.pt")
        torch.save(spec.tensors(spec.bind(args, kwargs)), tensors)
        command = [sys.executable, "-P", "-W", "ignore", "-c", _torch.export.RUN_PACKAGE, str(path), str(tensors)]
        try:
            subprocess.run(command, capture_output=True, timeout=_PATIENCE_SECONDS, check=True)
        except OSError:  # this Python, embedded in another program, cannot start a process
            return False
        except subprocess.TimeoutExpired:
            raise ExportError(f"the package did not end within {_PATIENCE_SECONDS} s") from None
        except subprocess.CalledProcessError as error:
            if error.returncode in _CRASHES:
                reason = in_one_line(describe_failure(error))
                raise ExportError(
                    f"the package crashes: {reason} (compile-callbacks doctor checks the compiler)"
                ) from None
            return False
    return True
