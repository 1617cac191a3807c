"""The names that ``train_mode`` and ``infer_mode`` take, and which of them do on a device what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from compile_callbacks import _torch
from compile_callbacks.settings import templates

_FOR = {
    "default": "Fused kernels: the usual choice",
    "reduce-overhead": "CUDA graphs: a step is launched as a whole, for models whose host is slower than their GPU",
    "max-autotune": "Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
    "max-autotune-no-cudagraphs": "Kernels chosen by measuring",
    "lite": "Eager kernels but where code asks for compiled ones: short to compile",
}


@dataclass(frozen=True, kw_only=True)
class ListedMode:
    """A mode of torch.compile, or a template.

    Attributes:
        name: What it is asked for by.
        kind: Which of the two it is.
        description: What it is for; empty for a mode of a torch that is newer than this list.
        mode: The mode that a template implies; ``None`` for none.
        options: The Inductor options that it sets, those of the implied mode left out.
        lacks: What keeps it from doing on the device what it says; ``None`` where nothing does.
    """

    name: str
    kind: Literal["mode", "template"]
    description: str
    mode: str | None
    options: Mapping[str, Any]
    lacks: str | None

    @property
    def works(self) -> bool:
        """Whether it does on the device what it says."""
        return self.lacks is None

    def to_dict(self) -> dict[str, Any]:
        """The mode as JSON-ready data."""
        return {**asdict(self), "works": self.works}


def list_modes(device: torch.device) -> list[ListedMode]:
    """Every mode that the installed torch knows, and every template.

    Args:
        device: Where modules are to run.

    Example::

        >>> [listed.works for listed in list_modes(torch.device("cpu")) if listed.name in ("default", "triton")]
        [True, False]
    """
    modes = [
        ListedMode(
            name=name,
            kind="mode",
            description=_FOR.get(name, ""),
            mode=None,
            options=(options := _torch.resolve_options(name, {}, None)),
            lacks=_idle_cudagraphs(options, device),
        )
        for name in _torch.mode_names()
    ]
    return modes + [
        ListedMode(
            name=template.name,
            kind="template",
            description=template.description,
            mode=template.mode,
            options=dict(template.options),
            lacks=template.falls_back(device) or _idle_cudagraphs(template.resolved_options(device), device),
        )
        for template in map(templates.get, templates.names())
    ]


def _idle_cudagraphs(options: Mapping[str, Any], device: torch.device) -> str | None:
    if options.get("triton.cudagraphs") and device.type != "cuda":
        return "its CUDA graphs have no effect without a GPU"
    return None
