"""`export`: writes a module to a ``.pt2`` package, which needs only torch to run."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import os
import re
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from compile_callbacks import _torch
from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.files import atomic_write
from compile_callbacks._utils.messages import check_choice, check_type, describe_failure, in_one_line
from compile_callbacks.config.inductor_config import InductorConfig, Mode, as_compiling_config
from compile_callbacks.exporting.call_check import CallSpec, copy_in_package_layout, is_batch
from compile_callbacks.exporting.loaded_package import (
    METADATA_KEY,
    ExportedModule,
    ExportError,
    Format,
    load_after_smoke_test,
)
from compile_callbacks.graphs.accuracy import Comparison, compare_results, not_compared, tolerance
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.passes.base import HOOK_OPTIONS
from compile_callbacks.passes.manager import find_pass_error, with_passes
from compile_callbacks.targets.fsdp import check_not_sharded

VerifyPackage = Literal["off", "warn", "raise"]
"""The reaction if a package differs from eager. ``"off"`` skips the comparison."""

_NO_CUDAGRAPHS = "a package records no CUDA graphs"
_NO_TORCH_CALLS = "passes at 'pre_grad' change torch function calls, and torch.export produces ATen operators"
_NO_FALLBACKS = "torch 2.11 calls operators that are not compiled with wrong arguments in a package"  # mode "lite"
_NOT_ACCEPTED = {
    "fallback_by_default": _NO_FALLBACKS,
    "selective_decompose": _NO_FALLBACKS,
    "aot_inductor.output_path": "export has the argument path",
    "aot_inductor.package": "export always writes a package",
    HOOK_OPTIONS["pre_grad"]: _NO_TORCH_CALLS,
}


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode = "default",
    verify: VerifyPackage = "raise",
    dynamic_batch: bool = True,
    format: Format = "aoti",  # noqa: A002
) -> Path:
    """Write a module to a ``.pt2`` package that runs without this library and without the module's code.

    The function exports the module in ``eval()`` mode under ``torch.no_grad()`` and the active autocast, on its own
    device. The module does not change. If this library or torch has compiled the module in place, the function exports
    the original module. It writes the file atomically and replaces an older file. A failure leaves no file.

    Args:
        module: The module to export.
        args: The positional inputs of one call, as in ``torch.export.export``. The package accepts only their shapes
            and dtypes. A value that is not a tensor becomes a constant of the package.
        path: The path of the file, which ends in ``.pt2``. The function creates missing folders.
        kwargs: The inputs of the call by name.
        mode: The settings of AOTInductor: a mode of ``torch.compile``, a template's name, an `InductorConfig`, or a
            mapping of its fields. A warning names the settings that AOTInductor does not support.
        verify: The reaction if the compiled package differs from eager by more than rounding explains: ``"raise"``
            raises an `ExportError` and writes nothing, and ``"warn"`` warns. ``"off"`` skips the comparison. With
            ``dynamic_batch``, a second batch size is compared, too. On a GPU, another process runs the package first,
            because a crash would end this process.
        dynamic_batch: Whether the batch size may change from call to call. The batch is dimension 0 of the first
            tensor, and of each other tensor whose dimension 0 has the same size.
        format: ``"aoti"`` is code that AOTInductor compiles for this type of device. ``"export"`` is the program of
            ``torch.export``, which any device can run or compile.

    Returns:
        The path of the file.

    Raises:
        ExportError: If the module cannot be exported or compiled, or the package differs from eager. The message
            contains the reason, and the line of the module's code if torch names it.
        TypeError: If an argument has the wrong type, or ``forward`` does not accept the inputs.
        ValueError: If a format or setting is unknown, the path does not end in ``.pt2``, the weights are sharded, or
            ``dynamic_batch=True`` and the inputs have no batch.
        OSError: If the path cannot be written. The function checks this before it compiles anything.

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
    if not isinstance(args, tuple):
        hint = "; pass one tensor as (tensor,)" if isinstance(args, torch.Tensor) else ""
        text = f"args must be a tuple of positional inputs, not {type(args).__name__}{hint}"
        raise TypeError(with_code("CC202", text))
    check_type("kwargs", kwargs, (Mapping, type(None)), "a mapping of names to inputs, or None")
    path = _check_path(path)
    check_choice("format", format, get_args(Format))
    check_choice("verify", verify, get_args(VerifyPackage))
    check_type("dynamic_batch", dynamic_batch, bool, "True or False")
    config = as_compiling_config(mode)
    if format == "export" and config != InductorConfig():
        warn_user("CC204", f"mode={config.describe()!r} has no effect with format='export', which compiles nothing")
    call = _ExportedCall(module, args, dict(kwargs or {}), dynamic_batch=dynamic_batch)
    _check_writable(path)
    with atomic_write(path) as temporary, _evaluating(module):
        call.write(temporary, None if format == "export" else config)
        if format == "aoti" and verify != "off":
            compared = call.compare(temporary)
            text = f"the package differs from eager: {compared.reason}"
            if compared.verdict == "not compared":
                warn_user("CC602", f"package {path} was not compared with eager: {compared.reason}")
            elif compared.verdict == "differs" and verify == "raise":
                raise ExportError(with_code("CC602", text))
            elif compared.verdict == "differs":
                warn_user("CC602", f"{path}: {text}")
    return path


def _compare_with_eager(
    eager: nn.Module, package: ExportedModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Comparison:
    """Compare the outputs of a package with the outputs of the original module."""

    def run(function: Callable[..., Any], convert: Callable[..., Any] = torch.clone) -> dict[str, torch.Tensor]:
        copied_args, copied_kwargs = tree_map_only(torch.Tensor, convert, (args, kwargs))
        outputs = tree_leaves(function(*copied_args, **copied_kwargs))
        return {f"output {i}": leaf for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)}

    def run_in_double() -> dict[str, torch.Tensor]:
        double_of = _torch.graphs.DOUBLE_OF
        with _torch.graphs.computing_in_double(True):
            return run(copy.deepcopy(eager).double(), lambda x: x.to(double_of.get(x.dtype, x.dtype), copy=True))

    before = Snapshot(eager)
    try:
        expected = run(eager)
        if before.drawn():
            return not_compared("random numbers", "the module draws random numbers")
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        allowed = tolerance({value.dtype for value in (*eager.parameters(), *inputs)}, inputs[0].device)
        return compare_results(expected, run(package), allowed, run_in_double)
    except torch.OutOfMemoryError as error:
        return not_compared("no memory", in_one_line(describe_failure(error)))
    finally:
        before.restore()


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode without gradients; restore its training flags and torch's generators after."""
    training_flags = {submodule: submodule.training for submodule in module.modules()}
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.no_grad(), torch.random.fork_rng(devices):
            module.eval()
            yield
    finally:
        for submodule, training in training_flags.items():
            submodule.training = training


class _ExportedCall:
    """The call that is exported, with copies of its inputs."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_batch: bool
    ) -> None:
        check_type("module", module, nn.Module, "a torch.nn.Module")
        check_not_sharded(module)
        self._module = _torch.dynamo.unwrap_dynamo(module)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            raise ValueError(with_code("CC205", "args contain no tensor; a package needs at least one tensor input"))
        if dynamic_batch and tensors[0].dim() == 0:
            text = "the first tensor of args has no dimensions, so it has no batch; set dynamic_batch=False"
            raise ValueError(with_code("CC205", text))
        self._device = tensors[0].device
        batch = tensors[0].shape[0] if dynamic_batch else None
        self._spec = CallSpec.of(self._module.forward, args, kwargs, batch)
        self._batches: list[torch.Tensor] = []

        def example(tensor: torch.Tensor) -> torch.Tensor:
            copied = copy_in_package_layout(tensor)
            if not is_batch(tensor, batch):
                return copied
            # torch.export makes a size of 1 a constant, so repeat the sample once. The program is the same.
            self._batches.append(torch.cat([copied, copied]) if batch == 1 else copied)
            return self._batches[-1]

        bound = self._spec.bind(args, kwargs)
        self._inputs: tuple[Any, Any] = tree_map_only(torch.Tensor, example, (bound.args, bound.kwargs))

    def write(self, path: Path, config: InductorConfig | None) -> None:
        """Write the package that AOTInductor compiles, or without a config the program of ``torch.export``."""
        metadata = json.dumps({"torch": torch.__version__, "device": self._device.type, "inputs": self._spec.to_json()})
        self._program = self._trace()
        if config is None:
            self._program.example_inputs = None  # because the file would contain the user's data
            torch.export.save(self._program, path, extra_files={METADATA_KEY: metadata})
        else:
            with torch.autocast(self._device.type, enabled=False):  # the program already contains the casts
                _compile(self._program, path, config, self._device, metadata)

    def compare(self, path: Path) -> Comparison:
        """Compare the package with the program, with a dynamic batch also for one more sample."""
        package = load_after_smoke_test(path, *self._inputs, self._device)

        def longer(tensor: torch.Tensor) -> torch.Tensor:
            return torch.cat([tensor, tensor[:1]]) if any(tensor is batch for batch in self._batches) else tensor

        inputs = [self._inputs, tree_map_only(torch.Tensor, longer, self._inputs)] if self._batches else [self._inputs]
        eager = self._program.module()
        results = [_compare_with_eager(eager, package, *each) for each in inputs]
        return next((result for result in results if result.verdict == "differs"), results[0])

    def _trace(self) -> Any:
        """Trace the call with ``torch.export``."""
        shapes = torch.export.ShapesCollection()
        batch = torch.export.Dim("batch")
        for tensor in self._batches:
            shapes[tensor] = {0: batch}
        try:
            program = torch.export.export(self._module, *self._inputs, dynamic_shapes=shapes)
            # torch.export ignores an active autocast. Tracing the program again inserts the casts.
            return program.run_decompositions({}) if torch.is_autocast_enabled(self._device.type) else program
        except Exception as error:
            name = type(self._module).__name__
            text = f"{name} cannot be exported: {_describe_trace_error(error)}"
            if "Constraints violated" in str(error):
                guard = next(iter(re.findall("generated guard (.+)", str(error))), "computes with it as a number")
                text = f"{name} does not work for every batch size ({guard}); dynamic_batch=False exports one size"
            raise ExportError(with_code("CC601", text)) from error


def _compile(program: Any, path: Path, config: InductorConfig, device: torch.device, metadata: str) -> None:
    """Compile a program with AOTInductor."""
    options, passes = _package_options(config, device)
    users = options.get("aot_inductor.metadata") or {}
    options = with_passes(options, passes, "infer") | {"aot_inductor.metadata": {**users, METADATA_KEY: metadata}}
    try:
        _torch.inductor.compile_package(program, str(path), options)
    except Exception as error:
        reason = str(find_pass_error(error) or f"AOTInductor failed: {describe_failure(error)}")
        raise ExportError(with_code("CC601", in_one_line(reason, 400))) from error


def _describe_trace_error(error: Exception) -> str:
    """Return the first lines of torch's message, and the line of the user's code."""
    reason = in_one_line(re.split("\n\n|For more information|The following call raised", str(error))[0], 400)
    if "data-dependent" in reason:
        reason = f"its control flow depends on the values of a tensor, which needs torch.cond: {reason}"
    elif type(error) is not RuntimeError and not type(error).__module__.startswith("torch."):
        reason = f"{type(error).__name__}: {reason}"
    internal = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [line for line in lines if Path(line[0]).is_file() and not line[0].startswith(internal)]
    return f"{reason} (at {users[-1][0]}:{users[-1][1]})" if users else reason


def _check_path(path: str | os.PathLike[str]) -> Path:
    """Check that the ``path`` argument is a path that ends in ``.pt2``."""
    check_type("path", path, (str, os.PathLike), "a path")
    path = Path(path)
    if path.suffix != ".pt2":
        raise ValueError(with_code("CC205", f"path={str(path)!r} must end in '.pt2'"))
    return path


def _check_writable(path: Path) -> None:
    """Create missing folders and check that the file can be written, before a compile that may take minutes."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "path is a folder", str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem}."):
            pass
    except OSError as error:
        raise type(error)(error.errno, f"path cannot be written: {error.strerror}", str(path)) from error


def _package_options(config: InductorConfig, device: torch.device) -> tuple[dict[str, Any], list[Any]]:
    """Return the options and passes that AOTInductor accepts, and warn with the reason to omit others."""
    options: dict[str, Any] = {}
    omitted: dict[str, list[str]] = defaultdict(list)
    for name, value in config.resolved_options(device).items():
        reason = _NO_CUDAGRAPHS if "cudagraph" in name else _NOT_ACCEPTED.get(name)
        if reason is None:
            options[name] = value
        elif value:
            omitted[reason].append(name)
    passes = [graph_pass for graph_pass in config.passes if graph_pass.hook != "pre_grad"]
    omitted[_NO_TORCH_CALLS] += [f"pass {each.name}" for each in config.passes if each not in passes]
    if config.dynamic is not None:
        omitted["dynamic_batch decides which sizes may change"].append(f"dynamic={config.dynamic}")
    if config.dynamo:
        omitted["torch.export has its own settings of Dynamo"].append(f"dynamo={dict(config.dynamo)}")
    if (falls_back := config.template_falls_back(device)) is not None:
        warn_user("CC604", falls_back)
    for reason, names in omitted.items():
        if names:
            warn_user("CC604", f"the package is compiled without {', '.join(names)}: {reason}")
    return options, passes
