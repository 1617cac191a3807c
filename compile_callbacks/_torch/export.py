"""Wraps AOTInductor packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def compile_package(program: Any, path: str, options: Mapping[str, Any]) -> None:
    """Compile an exported program with AOTInductor, and write the package.

    torch documents ``torch._inductor.aoti_compile_and_package`` for this, but that function changes the options.
    """
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=dict(options))


def load_package(path: str) -> Callable[[list[torch.Tensor]], Any]:
    """Load an AOTInductor package as a function of its input tensors, in the order of the export.

    torch documents ``torch._inductor.aoti_load_package`` for this. The loaded function parses two tree specs in each
    call, which takes longer than a small model, and compiles programs to find the processor's instructions. Without a
    compiler it logs that the package may not fit the processor.
    """
    from torch.utils._pytree import tree_unflatten, treespec_loads

    loader = torch._C._aoti.AOTIModelPackageLoader(path, "model", False, 1, -1)
    outputs = treespec_loads(loader.get_call_spec()[1])
    return lambda tensors: tree_unflatten(loader.boxed_run(tensors), outputs)


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
"""A script for ``python -P`` that runs an AOTInductor package once, on input tensors in a file."""
