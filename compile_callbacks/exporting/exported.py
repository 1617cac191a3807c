"""`load_exported`: a package that `export` wrote, as a callable."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from compile_callbacks import _torch
from compile_callbacks.exporting.call_spec import CallSpec
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.links import Explained, explain

Format = Literal["aoti", "export"]
"""What a ``.pt2`` file holds: compiled code, or the program that torch.export made."""

SPEC_KEY = "compile_callbacks"
"""Under this name a package's metadata hold what `export` knows of it."""

_AOTI_FOLDER = "data/aotinductor/model/"
_PROGRAM = "models/model.json"


class ExportError(RuntimeError):
    """A module cannot be exported, or a package cannot be loaded; the message says why."""


class ExportedModule:
    """A package, called as the module was that it was made of.

    Attributes:
        path: Its file.
        format: What the file holds.
        device: The type of the device that it runs on.
        torch_version: The torch that made it; ``None`` where the file does not say.
        spec: Its inputs; ``None`` where the file does not say, and calls are not checked.
    """

    def __init__(
        self,
        path: Path,
        format: Format,  # noqa: A002
        run: Callable[..., Any],
        *,
        device: str,
        torch_version: str | None,
        spec: CallSpec | None,
    ) -> None:
        self.path = path
        self.format = format
        self.device = device
        self.torch_version = torch_version
        self.spec = spec
        self._run = run
        if spec is not None:
            self.__signature__ = spec.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package.

        Raises:
            TypeError: Inputs are missing, or too many, or of another dtype or kind than at the export.
            ValueError: An input of another shape, on another device, or with another value than at the export.
        """
        if self.spec is None:
            return self._run(*args, **kwargs)
        try:
            bound = self.spec.bind(args, kwargs)
            tensors = self.spec.tensors(bound)
        except (TypeError, ValueError) as error:
            explain(error, "an-input-is-refused")
            raise
        if self.format == "aoti":
            return self._run(tensors)
        with torch.no_grad():
            return self._run(*bound.args, **bound.kwargs)

    def __repr__(self) -> str:
        inputs = "unknown" if self.spec is None else str(self.spec)
        return f"ExportedModule({str(self.path)!r}, format={self.format!r}, device={self.device!r}, inputs=({inputs}))"


@Explained("a-package-is-refused", ExportError)
def load_exported(path: str | os.PathLike[str]) -> ExportedModule:
    """Load a package that `export` wrote.

    The file is read as a whole once, to compare its checksums: torch loads damaged code without a word. Load none that
    you do not trust, as it holds code.

    Args:
        path: A ``.pt2`` file of either format.

    Returns:
        A callable that takes what the module's ``forward`` takes, by position or by name, and checks it: a tensor of
        another shape, dtype or device is an error here, and wrong numbers in what AOTInductor compiles. A package that
        this library did not write is called as torch has it, without checks.

    Raises:
        FileNotFoundError: There is no such file.
        ExportError: No package, a damaged one, one for a device that is not here, or one that this torch cannot load.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"path={str(path)!r} does not exist")
    names, metadata = read_package(path)
    made_by = metadata.get("torch")
    spec = CallSpec.from_json(metadata["inputs"]) if "inputs" in metadata else None
    device = str(metadata.get("device", "cpu"))
    if not _has(device):
        raise ExportError(f"{path} was exported for a {device} device, and there is none here")
    is_compiled = any(_AOTI_FOLDER in name for name in names)
    try:
        run = _compiled(path, spec) if is_compiled else _torch.load_program(str(path))
    except Exception as error:
        versions = f" (it was made by torch {made_by}, and this is {torch.__version__})" if made_by else ""
        reason = in_one_line(describe_failure(error))
        raise ExportError(f"{path} cannot be loaded by this torch{versions}: {reason}") from error
    return ExportedModule(
        path, "aoti" if is_compiled else "export", run, device=device, torch_version=made_by, spec=spec
    )


def _compiled(path: Path, spec: CallSpec | None) -> Callable[..., Any]:
    return _torch.load_package(str(path)) if spec is not None else _torch.load_foreign_package(str(path))


def read_package(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The names of what a package holds, and what it says of itself.

    Raises:
        ExportError: It is no package, or damaged.
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
            return names, _metadata(archive, names)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ExportError(f"{path} is damaged: {error}") from error


def _metadata(archive: zipfile.ZipFile, names: list[str]) -> dict[str, Any]:
    extra = next((name for name in names if name.endswith(f"extra/{SPEC_KEY}")), None)
    if extra is not None:
        data: dict[str, Any] = json.loads(archive.read(extra))
        return data
    wrapper = next((name for name in names if name.endswith("wrapper_metadata.json")), None)
    if wrapper is None:
        return {}
    of_torch = json.loads(archive.read(wrapper))
    return {"device": of_torch.get("AOTI_DEVICE_KEY", "cpu"), **json.loads(of_torch.get(SPEC_KEY, "{}"))}


def _has(device: str) -> bool:
    if device == "cpu":
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device and torch.accelerator.is_available()
