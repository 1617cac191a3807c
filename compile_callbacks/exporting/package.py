"""`export`: a module as a ``.pt2`` package, for processes that have torch and nothing else."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.files import atomic_write
from compile_callbacks._utils.messages import check_choice, describe_failure, in_one_line
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.config.mode import Mode
from compile_callbacks.exporting.call_spec import CallSpec, has_batch, in_own_layout
from compile_callbacks.exporting.loaded_package import SPEC_KEY, ExportedModule, ExportError, Format, load_after_trial
from compile_callbacks.exporting.package_options import check_path, check_settings, check_writable, package_options
from compile_callbacks.passes.manager import GraphPassError, pass_options
from compile_callbacks.runtime.accuracy import Comparison, Results, compare_results, tolerance
from compile_callbacks.runtime.fsdp import check_not_sharded
from compile_callbacks.runtime.snapshot import Snapshot


def export(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    config: Mode = None,
    dynamic_batch: bool = True,
    format: Format = "aoti",  # noqa: A002
    verify: bool = True,
) -> Path:
    """Write a module to a ``.pt2`` package that runs where neither this library nor the module's code is installed.

    The module is exported in ``eval()`` mode under ``torch.no_grad()`` and the active autocast, on its own device, and
    is not changed. If a module is compiled in place, by this library or by torch, the original is exported. The file is
    written atomically and replaces an older one; a failure leaves no file.

    Args:
        module: The module.
        example_inputs: The positional inputs of one call, as ``torch.export.export`` takes them. Shapes and dtypes
            count, and so do the values of what is no tensor: they become part of the package.
        path: Where to, ending in ``.pt2``; folders that are missing are made.
        example_kwargs: The inputs of the call that are given by name.
        config: The settings that ``"aoti"`` compiles with, as ``infer_mode`` takes them, but for ``"auto"``; ``None``
            for the default ones. A warning names the settings that AOTInductor does not support (docs/export.md).
        dynamic_batch: Whether the batch size may change from call to call: dimension 0 of the first tensor, and of
            each other one whose dimension 0 is of the same size.
        format: ``"aoti"``: compiled by AOTInductor, for this kind of device. ``"export"``: the program that
            ``torch.export`` makes, which any device runs, or compiles.
        verify: Whether what ``"aoti"`` compiles is compared with the program that it was compiled from, on the example
            inputs; the tolerance is in docs/correctness.md. On a GPU it is loaded for that beside the module, after a
            process of its own has run it: a package that crashes ends that one.

    Returns:
        The path.

    Raises:
        ExportError: The module cannot be exported or compiled, or what came of it differs from eager; the reason, and
            the line of it where torch knows that.
        TypeError: An argument of the wrong type, or inputs that ``forward`` does not take.
        ValueError: An unknown format or setting, another ending than ``.pt2``, ``dynamic_batch`` without a batch, or
            weights that are sharded.
        OSError: The path cannot be written. This is found out before anything is compiled.

    Example::

        >>> import tempfile
        >>> from compile_callbacks import load_exported
        >>> folder = tempfile.TemporaryDirectory()
        >>> module = torch.nn.Linear(4, 2)
        >>> path = export(module, (torch.randn(8, 4),), f"{folder.name}/linear.pt2", format="export")
        >>> load_exported(path)(torch.randn(3, 4)).shape
        torch.Size([3, 2])
        >>> folder.cleanup()
    """
    kwargs = _check_inputs(module, example_inputs, example_kwargs)
    path = check_path(path)
    check_choice("format", format, get_args(Format))
    settings = check_settings(config, dynamic_batch)
    if not isinstance(verify, bool):
        raise TypeError(f"verify={verify!r} must be True or False")
    if format == "export" and settings != InductorConfig():
        message = f"config={settings.describe()!r} has no effect with format='export', which compiles nothing"
        _warn(message)
    call = _Call(_torch.dynamo.unwrap_dynamo(module), example_inputs, kwargs, dynamic_batch=dynamic_batch)
    metadata = json.dumps({"torch": torch.__version__, "device": call.device.type, "inputs": call.spec.to_json()})
    check_writable(path)
    with atomic_write(path) as temporary, as_deployed(module):
        program = call.traced()
        if format == "export":
            # Else the example batch goes into the file, and with it a part of somebody's data.
            program.example_inputs = None
            _torch.export.save_program(program, str(temporary), {SPEC_KEY: metadata})
        else:
            with torch.autocast(call.device.type, enabled=False):  # it is in the program
                _compile(program, temporary, settings, call.device, metadata)
            if verify:
                compared = call.compare(_torch.export.program_as_module(program), temporary)
                if compared.verdict == "not compared":
                    message = f"{path} is not compared with eager: {compared.reason}"
                    _warn(message)
    return path


class _Call:
    """One call of a module, which is traced."""

    def __init__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        dynamic_batch: bool,
    ) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError("example_inputs hold no tensor; a package computes from tensors")
        if dynamic_batch and tensors[0].dim() == 0:
            message = "example_inputs: the first tensor has no dimensions, so no batch; dynamic_batch=False exports it"
            raise ValueError(message)
        self.device = tensors[0].device
        batch = tensors[0].shape[0] if dynamic_batch else None
        self.spec = CallSpec.of(module.forward, args, kwargs, batch)
        self._module = module
        bound = self.spec.bind(args, kwargs)
        batches = {id(tensor) for tensor in self.spec.batches(bound)}
        self._batches: list[torch.Tensor] = []

        def example(tensor: torch.Tensor) -> torch.Tensor:
            own = in_own_layout(tensor)
            if id(tensor) not in batches:
                return own
            # Torch takes a size of 1 for a constant; the same program comes out of two equal samples.
            self._batches.append(torch.cat([own, own]) if batch == 1 else own)
            return self._batches[-1]

        self._args, self._kwargs = tree_map_only(torch.Tensor, example, (bound.args, bound.kwargs))

    def traced(self) -> Any:
        """The program that ``torch.export`` makes of it."""
        shapes = torch.export.ShapesCollection()
        batch = torch.export.Dim("batch")
        for tensor in self._batches:
            shapes[tensor] = {0: batch}
        try:
            with _torch.export.quiet_export():
                program = _torch.export.export_program(
                    self._module, self._module.forward, self._args, self._kwargs, shapes, self.spec.signature
                )
                # A program knows no autocast from without until its operators are traced once more.
                return program.run_decompositions({}) if torch.is_autocast_enabled(self.device.type) else program
        except Exception as error:
            name = type(self._module).__name__
            if "Constraints violated" in str(error):
                raise ExportError(self._fixes_the_batch(name, str(error))) from error
            raise ExportError(f"{name} cannot be exported: {_why(error)}") from error

    def compare(self, eager: nn.Module, path: Path) -> Comparison:
        """Compare a package with eager; raises an error where it differs, or does not run."""
        package = load_after_trial(path, self._args, self._kwargs, self.device)
        return check_equal(eager, package, self._args, self._kwargs)

    def _fixes_the_batch(self, name: str, reason: str) -> str:
        inputs = [name for name, described in self.spec.inputs.items() if has_batch(described)]
        guards = re.findall("generated guard (.+)", reason)
        how = f"takes {guards[0].rstrip('.')} for granted" if guards else "computes with the size as a number"
        return (
            f"{name} is not right for every batch size of input {' and '.join(map(repr, inputs))}: it {how}; "
            f"dynamic_batch=False exports it for the size of the example"
        )


class DiffersFromEagerError(ExportError):
    """A package computes something else than the module does.

    Attributes:
        compared: How they differ.
    """

    def __init__(self, compared: Comparison) -> None:
        super().__init__(f"the package differs from eager: {compared.reason}")
        self.compared = compared


def check_equal(eager: nn.Module, package: ExportedModule, args: Any, kwargs: Any) -> Comparison:
    """Compare the outputs of a package with those of the module that it was made of.

    Raises:
        DiffersFromEagerError: It differs by more than rounding explains.
    """

    def run(function: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Results:
        outputs = tree_leaves(function(*tree_map_only(torch.Tensor, change, args), **changed_kwargs(change)))
        return Results({f"output {i}": leaf for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)})

    def changed_kwargs(change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        changed: dict[str, Any] = tree_map_only(torch.Tensor, change, kwargs)
        return changed

    def run_in_double(which: str, keep: Collection[str]) -> Results:
        with _torch.graphs.computing_in_double(True):
            return run(
                copy.deepcopy(eager).double(), lambda x: x.to(_torch.graphs.DOUBLE_OF.get(x.dtype, x.dtype), copy=True)
            )

    before = Snapshot(eager)
    try:
        expected = run(eager)
        if before.drew():
            return Comparison("not compared", "random numbers: the module draws some")
        actual = run(package)
        values = (*eager.parameters(), *tree_leaves((args, kwargs)))
        allowed = tolerance([value for value in values if isinstance(value, torch.Tensor)])
        compared = compare_results(expected, actual, allowed, run_in_double)
    except torch.OutOfMemoryError as error:
        return Comparison("not compared", f"no memory: {in_one_line(describe_failure(error))}")
    finally:
        before.restore()
    if compared.verdict == "differs":
        raise DiffersFromEagerError(compared)
    return compared


def _compile(program: Any, path: Path, config: InductorConfig, device: torch.device, metadata: str) -> None:
    """Compile a program; once more without a graph pass that failed."""
    options, passes, left_out = package_options(config, device)
    for reason in left_out:
        _warn(reason)
    of_user = options.get("aot_inductor.metadata") or {}
    options["aot_inductor.metadata"] = {**of_user, SPEC_KEY: metadata}
    skipped: list[Any] = []
    while True:
        try:
            return _torch.export.compile_package(
                program, str(path), options | pass_options(passes, "infer", skipped=skipped)
            )
        except Exception as error:
            failure = next((cause for cause in _torch.dynamo.causes(error) if isinstance(cause, GraphPassError)), None)
            if failure is None:
                raise ExportError(f"AOTInductor failed: {in_one_line(describe_failure(error), 400)}") from error
            skipped.append(failure.failed)
            _warn(f"{in_one_line(str(failure))}; the package is compiled without it")


@contextlib.contextmanager
def as_deployed(module: nn.Module) -> Iterator[None]:
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


def _check_inputs(module: object, example_inputs: object, example_kwargs: object) -> dict[str, Any]:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} must be a torch.nn.Module, not {type(module).__name__}")
    check_not_sharded(module)
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


def _why(error: Exception) -> str:
    """Why a module cannot be exported, in a line or two: torch's first lines, and the user's line."""
    reason = in_one_line(re.split("\n\n|For more information|The following call raised", str(error))[0], 400)
    if "data-dependent" in reason:
        reason = f"it decides by the values of a tensor, which a graph cannot (torch.cond can): {reason}"
    elif type(error) is not RuntimeError and not type(error).__module__.startswith("torch."):
        reason = f"{type(error).__name__}: {reason}"
    where = _users_line(error)
    return f"{reason} (at {where})" if where else reason


def _users_line(error: Exception) -> str | None:
    """The last line of the user's code that an error passed through."""
    inside = (_torch.export.torch_folder(), f"{Path(__file__).parents[1]}{os.sep}")
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [line for line in lines if Path(line[0]).is_file() and not line[0].startswith(inside)]
    return f"{users[-1][0]}:{users[-1][1]}" if users else None


def _warn(message: str) -> None:
    warnings.warn(message, CompileWarning, stacklevel=3)
