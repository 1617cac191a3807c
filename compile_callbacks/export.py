"""`export`: a module as a ``.pt2`` package, for processes that have torch and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_symbolic

from compile_callbacks import _torch
from compile_callbacks.call_spec import CallSpec, TensorInput, in_own_layout
from compile_callbacks.choices import check_choice
from compile_callbacks.config import InductorConfig, Mode, as_config
from compile_callbacks.exported import SPEC_KEY, ExportError, Format
from compile_callbacks.failures import describe_failure, in_one_line
from compile_callbacks.package_options import PackageOptions
from compile_callbacks.passes import GraphPassError
from compile_callbacks.region import CompileWarning


def export(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    config: Mode = None,
    dynamic_batch: bool = True,
    format: Format = "aoti",  # noqa: A002
) -> Path:
    """Write a module to a ``.pt2`` package that runs where neither this library nor the module's code is installed.

    The module is exported as it is in ``eval()`` under ``torch.no_grad()``, on the device where it is, and is left as
    it was. A module that is compiled in place, by this library or by torch, gives the original. The file appears when
    it is whole, and replaces an older one; a failure leaves nothing.

    Args:
        module: The module.
        example_inputs: The positional inputs of one call, as ``torch.export.export`` takes them. Shapes and dtypes
            count, and so do the values of what is no tensor: they become part of the package.
        path: Where to, ending in ``.pt2``; folders that are missing are made.
        example_kwargs: The inputs of the call that are given by name.
        config: The settings that ``"aoti"`` compiles with, as ``infer_mode`` takes them; ``None`` for the default
            ones. What AOTInductor cannot take is left out with a warning (docs/export.md).
        dynamic_batch: Whether the batch size may change from call to call: dimension 0 of the first tensor, and of
            each other one whose dimension 0 is of the same size.
        format: ``"aoti"``: compiled by AOTInductor, for this kind of device. ``"export"``: the program that
            ``torch.export`` makes, which any device runs, or compiles.

    Returns:
        The path.

    Raises:
        ExportError: The module cannot be exported or compiled; the reason, and the line of it where torch knows that.
        TypeError: An argument of the wrong type, or inputs that ``forward`` does not take.
        ValueError: An unknown format or setting, another ending than ``.pt2``, or ``dynamic_batch`` without a batch.
        OSError: The path cannot be written. This is found out before anything is compiled.

    Example::

        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> module = torch.nn.Linear(4, 2)
        >>> path = export(module, (torch.randn(8, 4),), f"{folder.name}/linear.pt2", format="export")
        >>> load_exported(path)(torch.randn(3, 4)).shape
        torch.Size([3, 2])
        >>> folder.cleanup()
    """
    kwargs = _check_inputs(module, example_inputs, example_kwargs)
    path = _check_path(path)
    check_choice("format", format, get_args(Format))
    if not isinstance(dynamic_batch, bool):
        raise TypeError(f"dynamic_batch={dynamic_batch!r} must be True or False")
    if config == "eager":
        raise ValueError("config='eager' compiles nothing; format='export' writes a package that is not compiled")
    settings = as_config(config, "config") or InductorConfig()
    call = _Call(module, example_inputs, kwargs, dynamic_batch=dynamic_batch)
    if format == "export" and config is not None:
        _warn(f"config={settings.describe()!r} has no effect with format='export', which compiles nothing")
    with _appears_whole(path) as beside, _as_deployed(module):
        program, spec = call.exported()
        if format == "export":
            # The example batch goes into the file else, and with it a part of somebody's data.
            program.example_inputs = None
            with _torch.quiet_export():
                torch.export.save(program, beside, extra_files={SPEC_KEY: _metadata(spec, call.device)})
        else:
            _compile(program, beside, PackageOptions(settings, call.device), _metadata(spec, call.device))
    return path


class _Call:
    """One call of a module, which is traced."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_batch: bool
    ) -> None:
        tensors = [leaf for leaf in _torch.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError("example_inputs hold no tensor; a package computes from tensors")
        self.module = module
        self.device = tensors[0].device
        self._batch: int | None = None
        if dynamic_batch:
            if tensors[0].dim() == 0:
                raise ValueError(
                    "example_inputs: the first tensor has no dimensions, so no batch; dynamic_batch=False exports it"
                )
            self._batch = tensors[0].shape[0]
        spec = CallSpec.of(module.forward, args, kwargs, self._batch)
        args, kwargs = _torch.tree_map_tensors(in_own_layout, (args, kwargs))
        if self._batch == 1:
            # Torch takes a size of 1 for a constant; the same program comes out of two equal samples.
            args, kwargs = _torch.tree_map_tensors(_doubled, (args, kwargs))
            self._batch = 2
        self._args, self._kwargs, self._spec = args, kwargs, spec

    def exported(self) -> tuple[Any, CallSpec]:
        """The program, and what it takes."""
        if self._batch is None:
            return self._traced(None), self._spec
        try:
            return self._traced(torch.export.Dim("batch")), self._spec
        except ExportError as error:
            return self._within_limits(error)

    def _within_limits(self, error: ExportError) -> tuple[Any, CallSpec]:
        """The program for the batch sizes that it is right for, where those are not all."""
        try:
            program = self._traced(torch.export.Dim.AUTO)
        except ExportError:
            raise error from error.__cause__  # it is not the batch
        inputs = [entry for entry in self._spec.inputs if not getattr(entry, "optional", False)]
        nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
        for entry, name in zip(inputs, program.graph_signature.user_inputs, strict=True):
            if not isinstance(entry, TensorInput) or None not in entry.shape:
                continue
            size = nodes[name].meta["val"].shape[0]
            if not is_symbolic(size):
                raise ExportError(
                    f"{type(self.module).__name__} fixes the batch size of input {entry.name!r} to {size}: it computes "
                    f"with the size as a number, or with a tensor of it; dynamic_batch=False exports it for this size"
                ) from error.__cause__
        lower, upper = _limits(program)
        try:
            program = self._traced(torch.export.Dim("batch", min=lower, max=upper))
        except ExportError as bound:
            guards = re.findall("generated guard (.+)", str(bound.__cause__))
            raise ExportError(
                f"{type(self.module).__name__} is not right for every batch size: it takes {guards[0] if guards else bound}"
                f" for granted; dynamic_batch=False exports it for a batch of {self._batch}"
            ) from bound.__cause__
        return program, self._spec.with_batches(lower, upper)

    def _traced(self, batch: Any) -> Any:
        shapes = torch.export.ShapesCollection()
        for leaf in _torch.tree_leaves((self._args, self._kwargs)):
            if isinstance(leaf, torch.Tensor) and batch is not None and leaf.dim() and leaf.shape[0] == self._batch:
                shapes[leaf] = {0: batch}
        try:
            with _torch.quiet_export():
                return torch.export.export(self.module, self._args, self._kwargs, dynamic_shapes=shapes)
        except Exception as error:
            raise ExportError(_cannot(self.module, error)) from error


def _compile(program: Any, path: Path, options: PackageOptions, metadata: str) -> None:
    """Compile a program; once more without a graph pass that failed."""
    for reason in options.left_out:
        _warn(reason)
    while True:
        try:
            return _torch.compile_package(program, str(path), options.resolved({SPEC_KEY: metadata}))
        except Exception as error:
            failure = next((cause for cause in _torch.causes(error) if isinstance(cause, GraphPassError)), None)
            if failure is None:
                raise ExportError(f"AOTInductor failed: {in_one_line(describe_failure(error), 400)}") from error
            options.skipped.append(failure.failed)
            _warn(f"{in_one_line(str(failure))}; the package is compiled without it")


@contextlib.contextmanager
def _as_deployed(module: nn.Module) -> Iterator[None]:
    """Have a module compute as it will in a package, and be as it was afterwards."""
    modes = {part: part.training for part in module.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            module.eval()
            yield
    finally:
        for part, training in modes.items():
            part.training = training


@contextlib.contextmanager
def _appears_whole(path: Path) -> Iterator[Path]:
    """A file beside ``path`` that takes its place in the end, and is gone where it does not come to that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"path={str(path)!r} is a folder")
    beside = path.with_name(f".{path.stem}.{os.getpid()}.pt2")
    try:
        beside.touch()  # before minutes of compiling
        yield beside
        beside.replace(path)
    finally:
        # Where the folder itself is no folder, or is read-only, there is nothing to take away.
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def _check_inputs(module: object, example_inputs: object, example_kwargs: object) -> dict[str, Any]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a torch.nn.Module, not {type(module).__name__}")
    if not isinstance(example_inputs, tuple):
        hint = "; one tensor is (tensor,)" if isinstance(example_inputs, torch.Tensor) else ""
        raise TypeError(
            f"example_inputs must be a tuple of positional inputs, not {type(example_inputs).__name__}{hint}"
        )
    if example_kwargs is None:
        return {}
    if not isinstance(example_kwargs, Mapping):
        raise TypeError(f"example_kwargs={example_kwargs!r} must map names to inputs")
    return dict(example_kwargs)


def _check_path(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} must be a path, not {type(path).__name__}")
    found = Path(path)
    if found.suffix != ".pt2":
        raise ValueError(f"path={str(found)!r} must end in '.pt2'")
    return found


def _limits(program: Any) -> tuple[int, int | None]:
    """The smallest and the largest batch that a program is right for; it has no other dynamic size."""
    limits = list(program.range_constraints.values())
    lower = max((int(limit.lower) for limit in limits), default=0)
    uppers = [int(limit.upper) for limit in limits if limit.upper.is_Integer]  # infinity is none
    return lower if lower > _SMALLEST_TRACED else 0, min(uppers, default=None)


_SMALLEST_TRACED = 2  # torch traces no dynamic size below it, and takes what it traced to be right for 0 and 1


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor]) if tensor.dim() and tensor.shape[0] == 1 else tensor


def _metadata(spec: CallSpec, device: torch.device) -> str:
    return json.dumps({"torch": torch.__version__, "device": device.type, "inputs": spec.to_json()})


def _cannot(module: nn.Module, error: Exception) -> str:
    """Why a module cannot be exported, in a line or two: torch's first lines, and the user's line."""
    text = re.split("\n\n|For more information|The following call raised", str(error))[0]
    reason = in_one_line(text, 400)
    if "data-dependent" in reason:
        reason = f"it decides by the values of a tensor, which a graph cannot (torch.cond can): {reason}"
    elif not _is_torchs(type(error)):
        reason = f"{type(error).__name__}: {reason}"
    where = _users_line(error)
    return f"{type(module).__name__} cannot be exported: {reason}" + (f" (at {where})" if where else "")


def _users_line(error: Exception) -> str | None:
    """The last line of the user's code that an error passed through."""
    inside = (_torch.torch_folder(), f"{Path(__file__).parent}{os.sep}")
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [line for line in lines if Path(line[0]).is_file() and not line[0].startswith(inside)]
    return f"{users[-1][0]}:{users[-1][1]}" if users else None


def _is_torchs(kind: type[Exception]) -> bool:
    return kind.__module__.startswith("torch.") or kind is RuntimeError


def _warn(message: str) -> None:
    warnings.warn(message, CompileWarning, stacklevel=3)
