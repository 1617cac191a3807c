"""What AOTInductor takes of a config, and what it does not."""

from __future__ import annotations

from typing import Any

import torch

from compile_callbacks.config import InductorConfig
from compile_callbacks.passes import HOOK_OPTIONS, pass_hook, pass_name, pass_options

_OWN = ("aot_inductor.output_path", "aot_inductor.package")
"""What `export` decides."""

_FALLBACKS = ("fallback_by_default", "selective_decompose")
"""Operators by their names (mode ``"lite"``): torch 2.11 calls them with the wrong arguments in a package."""


class PackageOptions:
    """The Inductor options of a package.

    Args:
        config: The settings.
        device: Where the package will run.

    Attributes:
        left_out: What of the settings has no effect, a sentence each.
        skipped: Graph passes that are not to run.
    """

    def __init__(self, config: InductorConfig, device: torch.device) -> None:
        self._options: dict[str, Any] = {}
        self.left_out: list[str] = []
        self.skipped: list[Any] = []
        dropped: dict[str, list[str]] = {}
        for name, value in config.resolved_options(device).items():
            if (reason := _why_not(name)) is None:
                self._options[name] = value
            elif value:
                dropped.setdefault(reason, []).append(name)
        self._passes = tuple(p for p in config.passes if pass_hook(p) != "pre_grad")
        if early := [pass_name(p) for p in config.passes if pass_hook(p) == "pre_grad"]:
            dropped.setdefault(_NO_TORCH_CALLS, []).extend(f"pass {name}" for name in early)
        if config.fold_weights:
            dropped["a package computes what depends on weights alone in each call, unless freezing=True"] = [
                "fold_weights=True"
            ]
        if config.dynamic is not None:
            dropped["dynamic_batch says what may change"] = [f"dynamic={config.dynamic}"]
        if (falls_back := config.template_falls_back(device)) is not None:
            self.left_out.append(falls_back)
        self.left_out += [f"left out of the package: {', '.join(what)}: {why}" for why, what in dropped.items()]

    def resolved(self, metadata: dict[str, str]) -> dict[str, Any]:
        """The options by name, those of the passes and a package's metadata among them."""
        passes = pass_options(self._passes, "infer", skipped=self.skipped)
        of_user = self._options.get("aot_inductor.metadata") or {}
        return {**self._options, **passes, "aot_inductor.metadata": {**of_user, **metadata}}


_NO_TORCH_CALLS = "torch.export gives a graph of ATen operators, and it runs on torch's own calls"


def _why_not(option: str) -> str | None:
    if "cudagraph" in option:
        return "a package records no CUDA graphs"
    if option in _FALLBACKS:
        return "a package calls compiled code"
    if option == HOOK_OPTIONS["pre_grad"]:
        return _NO_TORCH_CALLS
    return "export decides that" if option in _OWN else None
