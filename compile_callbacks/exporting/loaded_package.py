"""`load_exported`: checks and loads a package that `export` wrote. Also runs the smoke test of a new package."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Signature
from pathlib import Path
from typing import Any, Literal

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type, describe_failure, in_one_line
from compile_callbacks.exporting.call_check import CallSpec

Format = Literal["aoti", "export"]
"""The content of a ``.pt2`` file: compiled code, or the program of ``torch.export``."""

METADATA_KEY = "compile_callbacks"
"""The key of the library's entry in a package's metadata."""

_AOTI_FOLDER = "data/aotinductor/model/"
_METADATA_FILES: Mapping[Format, str] = {"aoti": "wrapper_metadata.json", "export": f"extra/{METADATA_KEY}"}


class ExportError(RuntimeError):
    """Raised if a module cannot be exported or a package cannot be loaded. The message contains the reason."""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExportedModule:
    """A loaded package, which you call like the original module.

    Attributes:
        path: The path of the file.
        format: The content of the file, ``"aoti"`` or ``"export"``.
        device: The type of the device that the package runs on.
        spec: The description of the inputs.
        run: The function that torch loaded. It does not check its inputs.
    """

    path: Path
    format: Format
    device: str
    spec: CallSpec
    run: Callable[..., Any]

    @property
    def __signature__(self) -> Signature:
        return self.spec.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package.

        Raises:
            TypeError: If there are too few or too many inputs.
            ValueError: If an input has another dtype, shape, device or constant value than the example.
        """
        bound = self.spec.bind(args, kwargs)
        tensors = self.spec.tensors(bound)
        if self.format == "aoti":
            return self.run(tensors)
        with torch.no_grad():
            return self.run(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        path = str(self.path)
        return f"ExportedModule({path!r}, format={self.format!r}, device={self.device!r}, inputs=({self.spec}))"


def load_exported(path: str | os.PathLike[str]) -> ExportedModule:
    """Load a package that `export` wrote.

    The function reads the whole file once to check its checksums, because torch loads damaged code without an error. A
    package contains code: do not load a package that you do not trust.

    Args:
        path: The path of a ``.pt2`` file of either format.

    Returns:
        A callable that takes the arguments of the module's ``forward``, by position or by name. Each call checks the
        shapes, dtypes and devices of its tensors, because AOTInductor's code would return wrong numbers for others.

    Raises:
        FileNotFoundError: If the file does not exist.
        ExportError: If the file is damaged, is not a package, or was not written by `export`. Also if the package needs
            a device that is not available, or this torch cannot load it.
    """
    check_type("path", path, (str, os.PathLike), "a path")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r} does not exist")
    content, metadata, spec = read_package(path)
    device = str(metadata.get("device", "cpu"))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (accelerator is None or accelerator.type != device):
        raise _not_loaded(f"{path} was exported for a device of type {device}, which is not available here")
    try:
        run = _torch.inductor.load_package(str(path)) if content == "aoti" else torch.export.load(path).module()
    except Exception as error:
        reason, written_by = in_one_line(describe_failure(error)), metadata.get("torch")
        if written_by != torch.__version__:
            reason += f"; torch {written_by} wrote it, and this is torch {torch.__version__}"
        if "map segment" in reason:
            reason += f"; files in {tempfile.gettempdir()!r} must be executable, or set TMPDIR to another folder"
        raise _not_loaded(f"{path} cannot be loaded: {reason}") from error
    return ExportedModule(path=path, format=content, device=device, spec=spec, run=run)


def read_package(path: Path) -> tuple[Format, dict[str, Any], CallSpec]:
    """Return the format, the metadata and the inputs of a package. Any other file raises an `ExportError`."""
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged.rpartition('/')[2]} does not match its checksum")
            names = archive.namelist()
            content: Format = "aoti" if any(_AOTI_FOLDER in name for name in names) else "export"
            ours = (name for name in names if name.endswith(_METADATA_FILES[content]))
            data = archive.read(next(ours, "metadata of this library"))
        metadata = json.loads(json.loads(data)[METADATA_KEY] if content == "aoti" else data)
        return content, metadata, CallSpec.from_json(metadata["inputs"])
    except Exception as error:  # a damaged file raises errors of many types
        text = (
            f"{path} is damaged, or was not written by compile_callbacks.export of this version: "
            f"{in_one_line(describe_failure(error))}"
        )
        raise _not_loaded(text) from error


def _not_loaded(reason: str) -> ExportError:
    return ExportError(with_code("CC603", reason))


_TIMEOUT_SECONDS = 300
_CRASHES = {-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)}


def load_after_smoke_test(
    path: Path, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> ExportedModule:
    """Load a new package. A package for a GPU runs once in another process first, as a smoke test.

    The smoke test takes seconds, because the process imports torch. Packages for a GPU crash more often, because
    AOTInductor generates more C++ code to launch kernels, and after a crash, a process cannot use the GPU any more.
    Any other error is raised with more details when this process loads the package.
    """
    if device.type == "cpu":
        return load_exported(path)
    *_, spec = read_package(path)
    with tempfile.TemporaryDirectory() as folder:
        tensors = Path(folder, "inputs.pt")
        torch.save(spec.tensors(spec.bind(args, kwargs)), tensors)
        command = [sys.executable, "-P", "-W", "ignore", "-c", _torch.inductor.RUN_PACKAGE, str(path), str(tensors)]
        try:
            subprocess.run(command, capture_output=True, timeout=_TIMEOUT_SECONDS, check=True)
        except OSError:  # Python cannot start a process if it is embedded in another program
            pass
        except subprocess.TimeoutExpired:
            text = f"the package did not end within {_TIMEOUT_SECONDS} s"
            raise ExportError(with_code("CC601", text)) from None
        except subprocess.CalledProcessError as error:
            if error.returncode in _CRASHES:
                text = f"the package crashed: {in_one_line(describe_failure(error))}"
                raise ExportError(with_code("CC601", text)) from None
    return load_exported(path)
