"""Templates: named sets of Inductor options. On a device that lacks a requirement, a template falls back to a mode.

Example::

    >>> get("max_autotune").mode
    'max-autotune'
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.messages import check_choice


class Template(NamedTuple):
    """A named set of Inductor options.

    Attributes:
        name: The name that ``train_mode`` and ``infer_mode`` accept.
        description: The purpose, in one sentence.
        mode: The mode of ``torch.compile`` that the template includes.
        options: Inductor options by name, which the template sets in addition to the mode.
        needs: The requirement of ``options``, in a few words.
        works_on: A function that returns whether a device fulfills the requirement.
    """

    name: str
    description: str
    mode: str = "default"
    options: Mapping[str, Any] = MappingProxyType({})
    needs: str = ""
    works_on: Callable[[torch.device], bool] = lambda device: True


def names() -> list[str]:
    """Return the names of all templates."""
    return list(_TEMPLATES)


def get(name: str) -> Template:
    """Return the template with this name.

    Raises:
        ValueError: If no template has this name.
    """
    check_choice("template", name, names())
    return _TEMPLATES[name]


def _has_cutlass() -> bool:
    return Path(_torch.inductor.settings().cutlass.cutlass_dir, "python", "cutlass_library").is_dir()


_ALL = (
    Template(
        "triton",
        "Matrix products and convolutions as Triton kernels, chosen by measuring; ATen if none fits",
        "max-autotune-no-cudagraphs",
        {
            "max_autotune_gemm_backends": "TRITON",
            # Includes ATen, because Triton has kernels for 2D and 3D convolutions only, and others would fail.
            "max_autotune_conv_backends": "TRITON,ATEN",
            "autotune_fallback_to_aten": True,
        },
        "a GPU that Triton supports",
        lambda device: device.type != "cpu" and importlib.util.find_spec("triton") is not None,
    ),
    Template(
        "cpp_wrapper",
        "C++ code in place of Python between kernels: less CPU time per call, longer to compile",
        options={"cpp_wrapper": True},
    ),
    Template(
        "cutlass",
        "Matrix products from CUTLASS and ATen, chosen by measuring",
        "max-autotune-no-cudagraphs",
        {"max_autotune_gemm_backends": "CUTLASS,ATEN"},
        "an NVIDIA GPU and the CUTLASS library (option cutlass.cutlass_dir)",
        lambda device: device.type == "cuda" and _has_cutlass(),
    ),
    Template(
        "aten",
        "Matrix products and convolutions from ATen only; Inductor generates fused operators",
        options={"max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"},
    ),
    Template("cudagraphs", "CUDA graphs: a step is one launch, for CPU-bound models on a GPU", "reduce-overhead"),
    Template(
        "max_autotune",
        "Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
        "max-autotune",
    ),
    Template(
        "freezing",
        "Weights frozen into the code while they are constant (test, predict); no effect in training",
        options={"freezing": True},
    ),
    Template(
        "tma",
        "Matrix products as persistent Triton kernels that load through the Tensor Memory Accelerator",
        "max-autotune-no-cudagraphs",
        {"triton.enable_persistent_tma_matmul": True, "triton.enable_template_tma_store": True},
        "an NVIDIA GPU with a Tensor Memory Accelerator (compute capability 9.0 or higher)",
        lambda device: device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0),
    ),
)

_TEMPLATES = {template.name: template for template in _ALL}
