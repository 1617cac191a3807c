"""`load_exported`: loads a package that `export` wrote, and checks the inputs of each call."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from compile_callbacks import _torch
from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type, describe_failure, in_one_line

METADATA_KEY = "compile_callbacks"
"""The key of the library's entry in a package's metadata."""

_METADATA_FILE = "wrapper_metadata.json"


class ExportError(RuntimeError):
    """Raised if a module cannot be exported or a package cannot be loaded. The message contains the reason."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a package, which each call checks, because AOTInductor's code returns wrong numbers for others."""

    positional: Sequence[str]  # the names of the parameters that the exported call passed by position
    texts: Mapping[str, str]  # such as {"x['mask']": "float32 (batch, 1, 8, 8) on cpu", "scale": "2.0"}, in order
    batches: Sequence[str]  # the names of the tensors whose dimension 0 may have any size

    @classmethod
    def of(cls, positional: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any], batch: int | None) -> Inputs:
        """Describe a call. A tensor whose dimension 0 has the size ``batch`` is a batch of any size."""
        leaves = cls(positional=positional, texts={}, batches=()).leaves(args, kwargs)
        batches = [name for name, value in leaves.items() if is_batch(value, batch)]
        texts = {name: _describe(value, has_batch=name in batches) for name, value in leaves.items()}
        return cls(positional=positional, texts=texts, batches=batches)

    def tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Check the inputs of a call, and return its tensors in the order and layout of the package."""
        leaves = self.leaves(args, kwargs)
        for name in sorted(leaves.keys() ^ self.texts.keys()):
            raise TypeError(self._mismatch(f"input {name!r} {'was not exported' if name in leaves else 'is missing'}"))
        for name, expected in self.texts.items():
            if _describe(leaves[name], has_batch=name in self.batches) != expected:
                raise ValueError(self._mismatch(f"input {name!r} is {_describe(leaves[name])}"))
        sizes = {name: leaves[name].shape[0] for name in self.batches}
        if len({*sizes.values()}) > 1:
            raise ValueError(self._mismatch(f"the inputs have different batch sizes, {sizes}"))
        return [leaves[name].contiguous() for name in self.texts if isinstance(leaves[name], torch.Tensor)]

    def __str__(self) -> str:
        """Describe the inputs in one line: ``images: float32 (batch, 1, 8, 8) on cpu, scale: 2.0``."""
        return ", ".join(f"{name}: {text}" for name, text in self.texts.items())

    def leaves(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tensors and constants of a call by name."""
        given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
        if len(given) < len(args) + len(kwargs):
            raise TypeError(self._mismatch(f"the call has {len(args)} inputs by position"))
        leaves = {}
        for name, value in given.items():
            if isinstance(value, torch.Tensor):  # the usual case does not need to flatten a tree
                leaves[name] = value
            else:
                leaves |= {name + keystr(path): leaf for path, leaf in tree_flatten_with_path(value)[0]}
        return leaves

    def _mismatch(self, problem: str) -> str:
        return with_code("CC605", f"{problem}; the package takes {self}")


def is_batch(value: Any, size: int | None) -> bool:
    """Return whether a value is a tensor whose dimension 0 is the batch of this size."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size


def _describe(value: Any, *, has_batch: bool = False) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    sizes = ["batch", *value.shape[1:]] if has_batch and value.dim() > 0 else value.shape
    return f"{str(value.dtype).removeprefix('torch.')} ({', '.join(map(str, sizes))}) on {value.device.type}"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExportedModule:
    """A loaded package, which you call like the original module.

    Attributes:
        path: The path of the file.
        device: The type of the device that the package runs on.
        inputs: The description of the inputs.
        run: The function that torch loaded. It does not check its inputs.
    """

    path: Path
    device: str
    inputs: Inputs
    run: Callable[[list[torch.Tensor]], Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the package.

        Raises:
            TypeError: If there are too few or too many inputs.
            ValueError: If an input has another dtype, shape, device or constant value than the example.
        """
        return self.run(self.inputs.tensors(args, kwargs))

    def __repr__(self) -> str:
        return f"ExportedModule({str(self.path)!r}, device={self.device!r}, inputs=({self.inputs}))"


def load_exported(path: str | os.PathLike[str]) -> ExportedModule:
    """Load a package that `export` wrote.

    The function reads the whole file once to check its checksums, because torch loads damaged code without an error. A
    package contains code: do not load a package that you do not trust.

    Args:
        path: The path of the ``.pt2`` file.

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
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None:
                raise ValueError(f"{damaged.rpartition('/')[2]} does not match its checksum")
            files = (name for name in archive.namelist() if name.endswith(_METADATA_FILE))
            metadata = json.loads(json.loads(archive.read(next(files, _METADATA_FILE)))[METADATA_KEY])
        inputs, device = Inputs(**metadata["inputs"]), str(metadata["device"])
    except Exception as error:  # a damaged file raises errors of many types
        text = f"{path} is damaged, or was not written by compile_callbacks.export of this version"
        raise _not_loaded(f"{text}: {in_one_line(describe_failure(error))}") from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device != "cpu" and (accelerator is None or accelerator.type != device):
        raise _not_loaded(f"{path} was exported for a device of type {device}, which is not available here")
    try:
        run = _torch.inductor.load_package(str(path))
    except Exception as error:
        versions = f"torch {metadata.get('torch')} wrote it, and this is torch {torch.__version__}"
        raise _not_loaded(f"{path} cannot be loaded: {in_one_line(describe_failure(error))}; {versions}") from error
    return ExportedModule(path=path, device=device, inputs=inputs, run=run)


def _not_loaded(reason: str) -> ExportError:
    return ExportError(with_code("CC603", reason))
