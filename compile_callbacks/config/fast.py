"""`Fast`: the mode ``"fast"``, which becomes ``"reduce-overhead"`` or ``"default"`` after the eager steps."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from compile_callbacks.config.inductor_config import InductorConfig, Settings, Variant

FAST = "fast"
"""The mode that `Fast` implements."""

LEAST_SHARE = 2 / 3
"""The share of a target's eager calls that must have one set of sizes. The other calls run eagerly."""


@dataclass(frozen=True)
class Fast(Settings):
    """The mode ``"reduce-overhead"`` if CUDA graphs fit the run, otherwise ``"default"``.

    Nobody has asked for CUDA graphs. They therefore replay one or two sets of sizes only: torch would record a CUDA
    graph for each size of a dynamic dimension.
    """

    shapes: Mapping[str, float] | None = None  # the shares, if no eager step shows them

    configs: tuple[InductorConfig, ...] = ()

    def describe(self) -> str:
        """Return the name of the mode."""
        return FAST

    def variant(self, devices: Collection[torch.device], sharded: str | None, shapes: Mapping[str, float]) -> Variant:
        """Choose the config when the eager steps of a phase end.

        Args:
            devices: The devices of the weights.
            sharded: Why CUDA graphs cannot use the weights, if they are sharded.
            shapes: The share of the most frequent set of sizes in the eager calls of each target.
        """
        doubt = _doubt(devices, sharded, shapes if self.shapes is None else self.shapes)
        if doubt:
            return Variant(InductorConfig(), reason=doubt)
        return Variant(InductorConfig(mode="reduce-overhead"), static=True, reason="equal shapes on one GPU")


def _doubt(devices: Collection[torch.device], sharded: str | None, shapes: Mapping[str, float]) -> str | None:
    """Return the reason not to use CUDA graphs, or ``None``."""
    if all(device.type != "cuda" for device in devices):
        return "the weights are not on a GPU"
    if len(devices) > 1:
        return "the weights are on several devices"
    if torch.version.hip is not None:  # pytorch#187715
        return "the GPU is not from NVIDIA"
    if sharded is not None:
        return "the weights are sharded"
    if threading.current_thread() is not threading.main_thread():  # torch 2.11 raises there
        return "the steps do not run in the main thread"
    if (allocator := torch.cuda.get_allocator_backend()) != "native":
        return f"the memory allocator is {allocator!r}"
    if not shapes:
        return "no eager step has shown the shapes"
    target, share = min(shapes.items(), key=lambda item: item[1])
    return f"{1 - share:.0%} of the calls of {target!r} have other shapes" if share < LEAST_SHARE else None
