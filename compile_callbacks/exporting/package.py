"""`export`: writes a module to a ``.pt2`` package, which needs only torch to run."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import os
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from inspect import Parameter
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
from compile_callbacks.exporting.loaded_package import METADATA_KEY, ExportError, Inputs, is_batch, load_exported
from compile_callbacks.graphs.accuracy import GraphComparison, compare_results, not_compared, tolerance
from compile_callbacks.graphs.snapshot import Snapshot
from compile_callbacks.passes.base import HOOK_OPTIONS
from compile_callbacks.passes.manager import find_pass_error, with_passes
from compile_callbacks.targets.fsdp import check_not_sharded

VerifyPackage = Literal["off", "warn", "raise"]
"""The reaction if a package differs from eager. ``"off"`` skips the comparison."""

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# torch 2.11 calls operators that are not compiled with wrong arguments in a package (mode "lite").
_NOT_ACCEPTED = (
    *("fallback_by_default", "selective_decompose", "aot_inductor.output_path", "aot_inductor.package"),
    HOOK_OPTIONS["pre_grad"],
)


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    mode: Mode = "default",
    verify: VerifyPackage = "raise",
    dynamic_batch: bool = True,
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
            ``dynamic_batch``, the compared batch has one more sample than the example.
        dynamic_batch: Whether the batch size may change from call to call. The batch is dimension 0 of the first
            tensor, and of each other tensor whose dimension 0 has the same size.

    Returns:
        The path of the file.

    Raises:
        ExportError: If the module cannot be exported or compiled, or the package differs from eager. The message
            contains the reason, and the line of the module's code if torch names it.
        TypeError: If an argument has the wrong type, or ``forward`` does not accept the inputs.
        ValueError: If a setting is unknown, the path does not end in ``.pt2``, the weights are sharded, or
            ``dynamic_batch=True`` and the inputs have no batch.
        OSError: If the path cannot be written. The function checks this before it compiles anything.

    Example::

        >>> from compile_callbacks import load_exported
        >>> module = torch.nn.Linear(4, 2)
        >>> path = export(module, (torch.randn(8, 4),), "linear.pt2")  # doctest: +SKIP
        >>> load_exported(path)(torch.randn(3, 4)).shape  # doctest: +SKIP
        torch.Size([3, 2])
    """
    check_type("args", args, tuple, "a tuple of positional inputs, such as (tensor,)")
    check_type("module", module, nn.Module, "a torch.nn.Module")
    check_type("path", path, (str, os.PathLike), "a path")
    check_choice("verify", verify, get_args(VerifyPackage))
    check_type("dynamic_batch", dynamic_batch, bool, "True or False")
    config, path = as_compiling_config(mode), Path(path)
    if path.suffix != ".pt2":
        raise ValueError(with_code("CC205", f"path={str(path)!r} must end in '.pt2'"))
    check_not_sharded(module)
    module = _torch.dynamo.unwrap_dynamo(module)
    bound = inspect.signature(module.forward).bind(*args, **(kwargs or {}))
    tensors = [leaf for leaf in tree_leaves((bound.args, bound.kwargs)) if isinstance(leaf, torch.Tensor)]
    if not tensors or (dynamic_batch and tensors[0].dim() == 0):
        text = "args must contain a tensor, whose dimension 0 is the batch; without a batch, set dynamic_batch=False"
        raise ValueError(with_code("CC205", text))
    batch, device = tensors[0].shape[0] if dynamic_batch else None, tensors[0].device
    named = [name for name, each in bound.signature.parameters.items() if each.kind < Parameter.VAR_POSITIONAL]
    positional = [*named, *(f"args_{i}" for i in range(len(bound.args)))][: len(bound.args)]
    described = asdict(Inputs.of(positional, bound.args, bound.kwargs, batch))
    metadata = {"torch": torch.__version__, "device": device.type, "inputs": described}
    inputs, batches = _examples((bound.args, bound.kwargs), batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_initialized() else []))
        for part in module.modules():
            undo.callback(setattr, part, "training", part.training)
        temporary = undo.enter_context(atomic_write(path))
        undo.enter_context(torch.no_grad())
        module.eval()
        temporary.touch()  # raises an error before a compile that may take minutes
        program = _trace(module, inputs, batches, device)
        with torch.autocast(device.type, enabled=False):  # the program already contains the casts
            _compile(program, temporary, config, device, json.dumps(metadata))
        if verify != "off":
            # A package has no guards. torch cannot run those of a tensor in ``**kwargs`` (2.15; no issue).
            compared = _compare(program.module(check_guards=False), temporary, inputs, batches, device)
            what = "was not compared with" if compared.result == "not compared" else "differs from"
            text = f"package {path} {what} eager: {compared.reason}"
            if compared.result == "differs" and verify == "raise":
                raise ExportError(with_code("CC602", text))
            if compared.result != "equal":
                warn_user("CC602", text)
    return path


def _examples(inputs: _Inputs, batch: int | None) -> tuple[_Inputs, list[torch.Tensor]]:
    """Copy the inputs of a call in the layout of the package, and return the copies and the batches among them."""
    batches = list[torch.Tensor]()

    def example(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().clone(memory_format=torch.contiguous_format)
        if not is_batch(tensor, batch):
            return copied
        # torch.export makes a size of 1 a constant, so repeat the sample once. The program is the same.
        batches.append(torch.cat([copied, copied]) if batch == 1 else copied)
        return batches[-1]

    return tree_map_only(torch.Tensor, example, inputs), batches


def _trace(module: nn.Module, inputs: _Inputs, batches: Sequence[torch.Tensor], device: torch.device) -> Any:
    """Trace a call with ``torch.export``."""
    shapes, batch = torch.export.ShapesCollection(), torch.export.Dim("batch")
    for tensor in batches:
        shapes[tensor] = {0: batch}
    try:
        program = torch.export.export(module, *inputs, dynamic_shapes=shapes)
        # torch.export ignores an active autocast. Tracing the program again inserts the casts.
        return program.run_decompositions({}) if torch.is_autocast_enabled(device.type) else program
    except Exception as error:
        name = type(module).__name__
        text = f"{name} cannot be exported: {_describe_trace_error(error)}"
        if "Constraints violated" in str(error):
            guard = next(iter(re.findall("generated guard (.+)", str(error))), "computes with it as a number")
            text = f"{name} does not work for every batch size ({guard}); dynamic_batch=False exports one size"
        raise ExportError(with_code("CC601", text)) from error


def _compile(program: Any, path: Path, config: InductorConfig, device: torch.device, metadata: str) -> None:
    """Compile a program with AOTInductor, and warn about settings that it does not support."""
    options = dict(config.resolved_options(device))
    passes = [graph_pass for graph_pass in config.passes if graph_pass.hook != "pre_grad"]
    omitted = [f"pass {each.name}" for each in config.passes if each not in passes]
    omitted += [f"{name}={value}" for name in ("dynamic", "dynamo") if (value := getattr(config, name))]
    for name in [name for name in options if "cudagraph" in name or name in _NOT_ACCEPTED]:
        omitted += [name] if options.pop(name) else []
    if omitted:
        warn_user("CC604", f"the package is compiled without {', '.join(omitted)}, which no package supports")
    if (falls_back := config.template_falls_back(device)) is not None:
        warn_user("CC604", falls_back)
    users = options.get("aot_inductor.metadata") or {}
    options = with_passes(options, passes, "infer") | {"aot_inductor.metadata": {**users, METADATA_KEY: metadata}}
    try:
        _torch.inductor.compile_package(program, str(path), options)
    except Exception as error:
        reason = str(find_pass_error(error) or f"AOTInductor failed: {describe_failure(error)}")
        raise ExportError(with_code("CC601", in_one_line(reason, 400))) from error


def _compare(
    eager: nn.Module, path: Path, inputs: _Inputs, batches: Sequence[torch.Tensor], device: torch.device
) -> GraphComparison:
    """Compare the outputs of a package with the outputs of the program, with a dynamic batch for one more sample."""
    package = load_exported(path)

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor[:1]]) if any(tensor is batch for batch in batches) else tensor

    def run(function: Callable[..., Any], convert: Callable[..., Any] = torch.clone) -> dict[str, torch.Tensor]:
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: convert(longer(tensor)), inputs)
        outputs = tree_leaves(function(*args, **kwargs))
        return {f"output {i}": leaf for i, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)}

    def run_in_double() -> dict[str, torch.Tensor]:
        double_of = _torch.graphs.DOUBLE_OF
        with _torch.graphs.computing_in_double(True):
            return run(copy.deepcopy(eager).double(), lambda x: x.to(double_of.get(x.dtype, x.dtype), copy=True))

    before = Snapshot(eager)
    try:
        expected = run(eager)
        drawn = before.drawn()
        before.restore()
        if drawn:
            return not_compared("random numbers", "the module draws random numbers")
        tensors = [*eager.parameters(), *tree_leaves(inputs)]
        dtypes = {value.dtype for value in tensors if isinstance(value, torch.Tensor)}
        return compare_results(expected, run(package), tolerance(dtypes, device), run_in_double)
    except torch.OutOfMemoryError as error:
        return not_compared("no memory", in_one_line(describe_failure(error)))


def _describe_trace_error(error: Exception) -> str:
    """Return the first lines of torch's message, and the line of the user's code."""
    text = f"{type(error).__name__}: {error}"
    reason = in_one_line(re.split("\n\n|For more information|The following call raised", text)[0], 400)
    internal = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
    lines = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    users = [line for line in lines if Path(line[0]).is_file() and not line[0].startswith(internal)]
    return f"{reason} (at {users[-1][0]}:{users[-1][1]})" if users else reason
