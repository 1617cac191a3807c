"""List the names that train_mode and infer_mode accept.

These are the modes of the installed torch, and the templates of options. The last column tells whether each mode or
template works on this machine.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import as_device
from compile_callbacks.config import templates
from compile_callbacks.config.fast import FAST
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.report.render import print_texts

_USED_FOR = {
    "default": "Fused kernels: the usual choice",
    "reduce-overhead": "CUDA graphs: a step is one launch, for CPU-bound models on a GPU",
    "max-autotune": "Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
    "max-autotune-no-cudagraphs": "Kernels chosen by measuring",
    "lite": "Eager kernels, except for code that requires compiled ones: short to compile",
}

_FAST = "reduce-overhead on one NVIDIA GPU if shapes are equal, otherwise default: the default of InductorCompile"

ARGUMENTS: dict[str, dict[str, Any]] = {
    "--device": {"metavar": "DEVICE", "help": "cpu, cuda or cuda:N (default: the GPU if there is one)"},
    "--json": {"action": "store_true", "dest": "as_json", "help": "print the list as JSON"},
}


def run(device: str | None, as_json: bool) -> int:
    """Print the list."""
    on = as_device(device or ("cuda" if torch.cuda.is_available() else "cpu"), "--device")
    listed = _list_modes(on)
    if as_json:
        sys.stdout.write(json.dumps({"device": str(on), "modes": listed}, indent=2) + "\n")
        return 0
    texts = [(mode["name"], mode["kind"], mode["description"], mode["lacks"] or "works") for mode in listed]
    print_texts(("name", "kind", "for", f"on {on}"), texts)
    sys.stdout.write("\n")
    rows = []
    for mode in listed:
        parts = [f"mode {mode['mode']}"] * bool(mode["mode"])
        parts += [f"{name}={value!r}" for name, value in mode["options"].items()]
        rows.append((mode["name"], ", ".join(parts) or "-"))
    print_texts(("name", "sets"), rows)
    return 0


def _list_modes(device: torch.device) -> list[dict[str, Any]]:
    """Return the modes and templates as JSON-ready data. ``"lacks"`` names a missing requirement, or ``None``."""
    listed: list[dict[str, Any]] = []
    for name, options in _torch.inductor.modes().items():
        described = {"name": name, "kind": "mode", "description": _USED_FOR.get(name, "")}
        listed.append({**described, "mode": None, "options": options})
    for each in map(templates.get, templates.names()):
        described = {"name": each.name, "kind": "template", "description": each.description}
        listed.append({**described, "mode": each.mode, "options": dict(each.options)})
    for entry in listed:
        config = InductorConfig(**{entry["kind"]: entry["name"]})
        entry["lacks"] = config.template_falls_back(device)
        if config.resolved_options(device).get("triton.cudagraphs") and device.type != "cuda":
            entry["lacks"] = "its CUDA graphs have no effect without a GPU"
    fast = {"name": FAST, "kind": "mode", "description": _FAST}
    return [{**fast, "mode": None, "options": {}, "lacks": None}, *listed]
