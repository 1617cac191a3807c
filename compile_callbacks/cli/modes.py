"""``compile-callbacks modes``: lists the modes and templates, and whether each works on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import as_device
from compile_callbacks.config import templates
from compile_callbacks.config.inductor_config import InductorConfig
from compile_callbacks.report.render import print_texts

_USED_FOR = {
    "default": "Fused kernels: the usual choice",
    "reduce-overhead": "CUDA graphs: a step is one launch, for CPU-bound models on a GPU",
    "max-autotune": "Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
    "max-autotune-no-cudagraphs": "Kernels chosen by measuring",
    "lite": "Eager kernels, except for code that requires compiled ones: short to compile",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = (
        "List the names that train_mode and infer_mode accept: the modes of the installed torch, and the templates of "
        "options. The last column tells whether each mode or template works on this machine."
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    device = as_device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"), "--device")
    listed = _list_modes(device)
    if args.json:
        sys.stdout.write(json.dumps({"device": str(device), "modes": listed}, indent=2) + "\n")
        return 0
    texts = [(mode["name"], mode["kind"], mode["description"], mode["lacks"] or "works") for mode in listed]
    print_texts(("name", "kind", "for", f"on {device}"), texts)
    sys.stdout.write("\n")
    for mode in listed:
        parts = [f"mode {mode['mode']}"] * bool(mode["mode"])
        mode["sets"] = ", ".join([*parts, *(f"{name}={value!r}" for name, value in mode["options"].items())]) or "-"
    print_texts(("name", "sets"), [(mode["name"], mode["sets"]) for mode in listed])
    return 0


def _list_modes(device: torch.device) -> list[dict[str, Any]]:
    """Return the modes and templates as JSON-ready data. ``"lacks"`` names a missing requirement, or ``None``."""

    def lacks(options: Mapping[str, Any]) -> str | None:
        without_effect = options.get("triton.cudagraphs") and device.type != "cuda"
        return "its CUDA graphs have no effect without a GPU" if without_effect else None

    rows: list[tuple[Any, ...]] = []
    for name, options in _torch.inductor.modes().items():
        rows.append((name, "mode", _USED_FOR.get(name, ""), None, options, lacks(options)))
    for template in map(templates.get, templates.names()):
        config = InductorConfig(template=template.name)
        falls_back = config.template_falls_back(device)
        reason = falls_back.removeprefix(f"template {template.name!r} ") if falls_back else None
        reason = reason or lacks(config.resolved_options(device))
        rows.append((template.name, "template", template.description, template.mode, dict(template.options), reason))
    return [dict(zip(("name", "kind", "description", "mode", "options", "lacks"), row, strict=True)) for row in rows]
