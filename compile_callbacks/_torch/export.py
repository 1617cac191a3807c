"""``torch.export`` and AOTInductor packages."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Export without what torch says beside its error: the graph that it has so far, on stderr."""
    printed = io.StringIO()
    with own_warnings_off(), contextlib.redirect_stderr(printed):
        yield
    sys.stderr.write(printed.getvalue())  # nothing failed: it is what the module itself printed


@contextlib.contextmanager
def own_warnings_off() -> Iterator[None]:
    """Torch 2.11 warns of its own use of ``LeafSpec``, and of buffers that it reads and does not write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.|copyreg")
        yield


def export_program(
    module: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shapes: Any,
    signature: inspect.Signature,
) -> Any:
    """``torch.export.export``, for a module whose ``forward`` takes ``**kwargs`` too.

    Torch 2.11 fails on dynamic shapes of such inputs with an assertion of its own; it goes by the signature.

    Args:
        module: The module.
        forward: What it computes.
        args: Inputs by position.
        kwargs: Inputs by name.
        shapes: What is dynamic.
        signature: A signature that names each of the inputs.
    """
    own = vars(module).get("forward")
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    hooks_before = set(hooks)

    @functools.wraps(module.forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature  # type: ignore[attr-defined]
    vars(module)["forward"] = named
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    finally:
        vars(module).pop("forward")
        if own is not None:
            vars(module)["forward"] = own
        # An export that fails leaves torch 2.11's hook on every module of the process, and Dynamo then breaks the
        # graph wherever a buffer is assigned. Torch 2.15 removes the hook itself; delete this when it is the oldest.
        for hook in set(hooks) - hooks_before:
            del hooks[hook]


def torch_folder() -> str:
    """Where torch's own source lies."""
    return f"{Path(torch.__file__).parent}{os.sep}"


def compile_package(program: Any, path: str, options: Mapping[str, Any]) -> None:
    """Compile what ``torch.export`` gave with AOTInductor, and write the package.

    ``torch._inductor.aoti_compile_and_package`` is what torch's documentation tells users to call; it has no name
    without an underscore. It writes into the mapping that it is given.

    Args:
        program: The exported program.
        path: The package; its name has to end in ``.pt2``.
        options: Inductor settings.
    """
    with own_warnings_off():
        torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def save_program(program: Any, path: str, extra_files: dict[str, Any]) -> None:
    """``torch.export.save``."""
    with own_warnings_off():
        torch.export.save(program, path, extra_files=extra_files)


def load_program(path: str) -> torch.nn.Module:
    """What ``torch.export.save`` wrote, as a module."""
    with own_warnings_off():
        return program_as_module(torch.export.load(path))


def program_as_module(program: Any) -> torch.nn.Module:
    """What an exported program computes, uncompiled."""
    with own_warnings_off():
        module: torch.nn.Module = program.module()
        return module


def load_package(path: str) -> Callable[[list[torch.Tensor]], Any]:
    """What an AOTInductor package computes, as a function of its input tensors in the order of the export.

    ``torch._inductor.aoti_load_package`` is what torch's documentation tells users to call. What it returns reads its
    two tree specs anew in each call, which takes longer than a small model does; the outputs' is read once here, and
    the inputs' is not needed.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    loader = load_foreign_package(path).loader
    outputs = treespec_loads(loader.get_call_spec()[1])

    def run(tensors: list[torch.Tensor]) -> Any:
        return tree_unflatten(loader.boxed_run(tensors), outputs)

    return run


def load_foreign_package(path: str) -> Any:
    """An AOTInductor package as torch loads it, called with the arguments of the export."""
    with own_warnings_off():
        return torch._inductor.aoti_load_package(path)


RUN_PACKAGE = """
import os
import sys

sys.path.append(os.getcwd())  # last: a file there must not take the place of a module
import torch

package, inputs = sys.argv[1:]
tensors = torch.load(inputs, weights_only=True)
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(max(0, *(tensor.get_device() for tensor in tensors)))
torch._C._aoti.AOTIModelPackageLoader(package, "model", False, 1, -1).boxed_run(tensors)
if torch.accelerator.is_available():
    torch.accelerator.synchronize()
"""
"""A script that runs an AOTInductor package once, on input tensors in a file; for ``python -P``.

It imports torch alone, and what `torch._inductor.aoti_load_package` calls (torch 2.11 to 2.15) in place of that, which
imports Inductor for some seconds more.
"""
