"""Wraps ``torch.export`` and AOTInductor packages."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest.mock import patch

import torch


@contextlib.contextmanager
def own_warnings_off() -> Iterator[None]:
    """Ignore torch's warnings about its own code within the ``with`` block.

    Workaround (torch<2.12): torch warns about its own use of ``LeafSpec``, and about buffers that it only reads.
    """
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
    """Call ``torch.export.export`` for a module whose ``forward`` may take ``**kwargs``.

    Workaround (torch<2.12): ``torch.export.export`` fails with an assertion on dynamic shapes of keyword arguments that
    the signature does not name. A failed export leaves a hook on each module of the process, and Dynamo then breaks the
    graph at each assignment of a buffer.
    """
    hooks = torch.nn.modules.module._global_buffer_registration_hooks
    hooks_before = set(hooks)

    @functools.wraps(module.forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    named.__signature__ = signature  # type: ignore[attr-defined]
    try:
        with patch.object(module, "forward", named):
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    finally:
        for hook in set(hooks) - hooks_before:
            del hooks[hook]


def compile_package(program: Any, path: str, options: Mapping[str, Any]) -> None:
    """Compile an exported program with AOTInductor, and write the package.

    torch documents ``torch._inductor.aoti_compile_and_package`` for this, but that function changes the options.
    """
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def load_package(path: str) -> Callable[[list[torch.Tensor]], Any]:
    """Load an AOTInductor package as a function of its input tensors, in the order of the export.

    torch documents ``torch._inductor.aoti_load_package`` for this. The loaded function parses two tree specs in each
    call, which takes longer than a small model. Our function parses the spec of the outputs once, and needs no spec of
    the inputs. With an empty cache, torch's function also compiles programs to find the processor's instructions.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    outputs = treespec_loads(loader.get_call_spec()[1])

    def run(tensors: list[torch.Tensor]) -> Any:
        return tree_unflatten(loader.boxed_run(tensors), outputs)

    return run


RUN_PACKAGE = """
import os
import sys

sys.path.append(os.getcwd())  # appended, because a file there must not replace a module
import torch

package, inputs = sys.argv[1:]
tensors = torch.load(inputs, weights_only=True)
if torch.accelerator.is_available():
    torch.accelerator.set_device_index(max(0, *(tensor.get_device() for tensor in tensors)))
torch._C._aoti.AOTIModelPackageLoader(package, "model", False, 1, -1).boxed_run(tensors)
if torch.accelerator.is_available():
    torch.accelerator.synchronize()
"""
"""A script for ``python -P`` that runs an AOTInductor package once, on input tensors in a file.

The script calls the loader of `torch._inductor.aoti_load_package` directly (torch 2.11 to 2.15), because importing
Inductor takes seconds.
"""
