"""What AOTInductor takes of a config, and what it does not."""

from __future__ import annotations

from typing import Any

import torch

from compile_callbacks.passes import HOOK_OPTIONS, pass_hook, pass_name
from compile_callbacks.settings.config import InductorConfig

_NO_CUDAGRAPHS = "a package records no CUDA graphs"
_NO_TORCH_CALLS = "it runs on torch's own calls, and torch.export gives ATen operators"
_NO_FALLBACKS = "torch 2.11 calls operators that are not compiled with wrong arguments in a package"  # mode "lite"
_NOT_TAKEN = {
    "fallback_by_default": _NO_FALLBACKS,
    "selective_decompose": _NO_FALLBACKS,
    "aot_inductor.output_path": "export decides where the package goes",
    "aot_inductor.package": "export decides where the package goes",
    HOOK_OPTIONS["pre_grad"]: _NO_TORCH_CALLS,
}


def package_options(config: InductorConfig, device: torch.device) -> tuple[dict[str, Any], list[Any], list[str]]:
    """The options and the passes of a config that AOTInductor takes, and what it does not, a sentence for each reason.

    Args:
        config: The settings.
        device: Where the package will run.
    """
    options: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for name, value in config.resolved_options(device).items():
        reason = _NO_CUDAGRAPHS if "cudagraph" in name else _NOT_TAKEN.get(name)
        if reason is None:
            options[name] = value
        elif value:
            left_out.setdefault(reason, []).append(name)
    passes = []
    for graph_pass in config.passes:
        if pass_hook(graph_pass) == "pre_grad":
            left_out.setdefault(_NO_TORCH_CALLS, []).append(f"pass {pass_name(graph_pass)}")
        else:
            passes.append(graph_pass)
    if config.fold_weights:
        left_out["a package folds with freezing=True"] = ["fold_weights=True"]
    if config.dynamic is not None:
        left_out["dynamic_batch says what may change"] = [f"dynamic={config.dynamic}"]
    sentences = [f"left out of the package: {', '.join(what)}: {why}" for why, what in left_out.items()]
    falls_back = config.template_falls_back(device)
    return options, passes, sentences if falls_back is None else [falls_back, *sentences]
