"""Named sets of Inductor options: what each is for, what it sets, what it needs, and what it falls back to.

Example::

    >>> get("max_autotune").mode
    'max-autotune'
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import override

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.links import checks_settings
from compile_callbacks.settings.options import as_options


def _nothing_is_missing(device: torch.device) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Template:
    """A named set of Inductor options.

    Args:
        name: What it is asked for by; none of torch's modes.
        description: What it is for, in a sentence.
        mode: The mode of ``torch.compile`` that it implies; ``None`` for the default one.
        options: Inductor options on top of the mode, by name.
        missing: Given a device, what a module on it lacks for this template, in a few words; ``None`` for nothing.
        fallback: What is used where something is missing: the mode, without ``options``. In a few words.

    Raises:
        ValueError: An unknown mode or option, or no name.
        TypeError: A value of the wrong type.
    """

    name: str
    description: str
    mode: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    missing: Callable[[torch.device], str | None] = _nothing_is_missing
    fallback: str = ""

    @checks_settings
    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name={self.name!r} must be a string, not {type(self.name).__name__}")
        if not self.name or self.name in (*_torch.mode_names(), "eager", "auto"):
            raise ValueError(f"name={self.name!r} is no name for a template: it is empty or means something else")
        if self.mode is not None and self.mode not in _torch.mode_names():
            raise ValueError(unknown("mode", self.mode, _torch.mode_names()))
        object.__setattr__(self, "options", as_options(self.options))

    def resolved_options(self, device: torch.device | None = None) -> dict[str, Any]:
        """Every Inductor option that the template sets, its mode's among them.

        Args:
            device: Where the module is: without ``options`` if something is missing there. ``None``: as if nothing
                were.
        """
        lacks = device is not None and self.missing(device) is not None
        return {**_torch.resolve_options(self.mode, {}, None), **({} if lacks else self.options)}

    def falls_back(self, device: torch.device) -> str | None:
        """What is missing on this device and what is used instead, in a sentence; ``None`` where nothing is."""
        missing = self.missing(device)
        return None if missing is None else f"template {self.name!r} needs {missing}; it falls back to {self.fallback}"


def names() -> list[str]:
    """The names of all templates, those that users registered last."""
    return list(_templates())


@checks_settings
def get(name: str) -> Template:
    """The template of this name.

    Raises:
        ValueError: There is none.
    """
    if name not in _templates():
        raise ValueError(unknown("template", name, _templates()))
    return _templates()[name]


@checks_settings
def register(template: Template) -> Template:
    """Make a template known by its name, in this process.

    Raises:
        ValueError: Another template has that name.
        TypeError: Not a `Template`.
    """
    if not isinstance(template, Template):
        raise TypeError(f"template={template!r} must be a Template, not {type(template).__name__}")
    if template.name in _templates():
        raise ValueError(f"name={template.name!r} is taken: {get(template.name).description}")
    _registered[template.name] = template
    return template


@checks_settings
def unregister(name: str) -> None:
    """Forget a template that was registered.

    Raises:
        ValueError: There is none, or it is one of the library's own.
    """
    if name in _own():
        raise ValueError(f"name={name!r} is one of the library's own templates")
    get(name)
    del _registered[name]


# ---------------------------------------------------------------------------------------------- the library's own


def _without_triton(device: torch.device) -> str | None:
    if device.type == "cpu":
        return "a GPU, and the module is on a CPU"
    return None if _torch.has_triton() else "Triton, which is not installed or does not know this GPU"


def _without_cutlass(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "an NVIDIA GPU"
    if _torch.has_cutlass():
        return None
    return "the CUTLASS library (pip install nvidia-cutlass, or option cutlass.cutlass_dir)"


def _without_tma(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "an NVIDIA GPU"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:  # the Tensor Memory Accelerator came with Hopper, compute capability 9.0
        return f"a GPU of compute capability 9.0 or higher, and this is {major}.{minor}"
    return None if _torch.has_triton_tma() else "a Triton that knows the Tensor Memory Accelerator"


_FORMER_NAMES: Mapping[str, Sequence[str]] = {}
"""What options of these templates were called before, the newest name first; none was renamed from 2.11 to 2.15."""


class _OwnTemplate(Template):
    """One of the library's own: where torch drops one of its options, or its value, the others stay.

    Attributes:
        left_out: What the installed torch does not take.
    """

    left_out: tuple[str, ...] = ()

    @override
    def __post_init__(self) -> None:
        options: dict[str, Any] = {}
        left_out = []
        for name, value in self.options.items():
            if taken := _as_this_torch_takes(name, value):
                options |= taken
            else:
                left_out.append(f"{name}={value!r}")
        object.__setattr__(self, "options", options)
        object.__setattr__(self, "left_out", tuple(left_out))
        super().__post_init__()

    @override
    def falls_back(self, device: torch.device) -> str | None:
        reason = super().falls_back(device)
        if reason is not None or not self.left_out:
            return reason
        rest = "its other options" if self.options else f"mode {self.mode or 'default'!r} as it is"
        options = f"Inductor's {' and '.join(self.left_out)}, which torch {torch.__version__} does not take"
        return f"template {self.name!r} needs {options}; it falls back to {rest}"


def _as_this_torch_takes(name: str, value: Any) -> Mapping[str, Any]:
    """An option by the newest of its names that the installed torch knows; empty where it takes none of them."""
    for known in (name, *_FORMER_NAMES.get(name, ())):
        with contextlib.suppress(ValueError, TypeError):
            return as_options({known: value})
    return {}


@functools.cache
def _own() -> dict[str, Template]:
    # Made when asked for: checking option names takes longer than importing this library may.
    own = [
        _OwnTemplate(
            name="triton",
            description="Matrix products and convolutions as Triton kernels, chosen by measuring; ATen where none fits",
            mode="max-autotune-no-cudagraphs",
            options={
                "max_autotune_gemm_backends": "TRITON",
                # Triton has a choice for two- and three-dimensional convolutions only: without ATen, others fail.
                "max_autotune_conv_backends": "TRITON,ATEN",
                "autotune_fallback_to_aten": True,
            },
            missing=_without_triton,
            fallback="max-autotune-no-cudagraphs as it is on this device",
        ),
        _OwnTemplate(
            name="cpp_wrapper",
            description="C++ in place of Python between kernels: less work for the host, longer to compile",
            options={"cpp_wrapper": True},
        ),
        _OwnTemplate(
            name="cutlass",
            description="Matrix products from CUTLASS beside ATen's, chosen by measuring",
            mode="max-autotune-no-cudagraphs",
            options={"max_autotune_gemm_backends": "CUTLASS,ATEN"},
            missing=_without_cutlass,
            fallback="max-autotune-no-cudagraphs, which chooses among Triton's and ATen's",
        ),
        _OwnTemplate(
            name="aten",
            description="Matrix products and convolutions from ATen's libraries alone; only what is fused is generated",
            options={"max_autotune_gemm_backends": "ATEN", "max_autotune_conv_backends": "ATEN"},
        ),
        _OwnTemplate(
            name="cudagraphs",
            description="CUDA graphs: a step is launched as a whole, for models whose host is slower than their GPU",
            mode="reduce-overhead",
        ),
        _OwnTemplate(
            name="max_autotune",
            description="Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
            mode="max-autotune",
        ),
        _OwnTemplate(
            name="freezing",
            description="Weights baked in where they stand still (test, predict); without effect in training",
            options={"freezing": True},
        ),
        _OwnTemplate(
            name="tma",
            description="Matrix products as persistent Triton kernels that load through the Tensor Memory Accelerator",
            mode="max-autotune-no-cudagraphs",
            options={"triton.enable_persistent_tma_matmul": True, "triton.enable_template_tma_store": True},
            missing=_without_tma,
            fallback="max-autotune-no-cudagraphs as it is on this device",
        ),
    ]
    return {template.name: template for template in own}


_registered: dict[str, Template] = {}


def _templates() -> dict[str, Template]:
    return {**_own(), **_registered}
