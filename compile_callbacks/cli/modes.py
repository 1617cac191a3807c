"""``compile-callbacks modes``: the modes and templates, and whether they work on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.device import parse_device
from compile_callbacks.config import templates
from compile_callbacks.report.console import print_texts

_DESCRIPTION = """\
List the names that train_mode and infer_mode accept: the modes of the installed torch, and the templates of options.
The last column tells whether each works on this machine.
"""

_FOR = {
    "default": "Fused kernels: the usual choice",
    "reduce-overhead": "CUDA graphs: a step is one launch, for CPU-bound models on a GPU",
    "max-autotune": "Kernels chosen by measuring, and CUDA graphs: the fastest steps, the longest compile",
    "max-autotune-no-cudagraphs": "Kernels chosen by measuring",
    "lite": "Eager kernels, except where code asks for compiled ones: short to compile",
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "modes", help="list modes and templates, and whether they work here", description=_DESCRIPTION
    )
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: the GPU if there is one)")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(command=modes)


def modes(args: argparse.Namespace) -> int:
    """Print the list.

    Returns:
        The exit status: 2 for a device that is not there.
    """
    try:
        device = parse_device(args.device)
    except ValueError as error:
        sys.stderr.write(f"compile-callbacks modes: {error}\n")
        return 2
    listed = list_modes(device)
    if args.json:
        sys.stdout.write(json.dumps({"device": str(device), "modes": listed}, indent=2) + "\n")
        return 0
    texts = [(mode["name"], mode["kind"], mode["description"], mode["lacks"] or "works") for mode in listed]
    print_texts(("name", "kind", "for", f"on {device}"), texts)
    sys.stdout.write("\n")
    print_texts(("name", "sets"), [(mode["name"], _sets(mode)) for mode in listed])
    return 0


def list_modes(device: torch.device) -> list[dict[str, Any]]:
    """List every mode of the installed torch, and every template, as JSON-ready data.

    Each has ``name``, ``kind`` (``"mode"`` or ``"template"``), ``description``, ``mode`` (the base of a template),
    ``options`` (the Inductor options that it sets), and ``lacks``: what the device lacks for it, or ``None``.

    Args:
        device: The device that modules will run on.
    """
    rows: list[tuple[Any, ...]] = []
    for name in _torch.inductor.mode_names():
        options = _torch.inductor.resolve_options(name, {}, None)
        rows.append((name, "mode", _FOR.get(name, ""), None, options, _idle_cudagraphs(options, device)))
    for template in map(templates.get, templates.names()):
        lacks = template.falls_back(device) or _idle_cudagraphs(template.resolved_options(device), device)
        lacks = lacks and lacks.removeprefix(f"template {template.name!r} ")
        rows.append((template.name, "template", template.description, template.mode, dict(template.options), lacks))
    return [dict(zip(("name", "kind", "description", "mode", "options", "lacks"), row, strict=True)) for row in rows]


def _idle_cudagraphs(options: Mapping[str, Any], device: torch.device) -> str | None:
    if options.get("triton.cudagraphs") and device.type != "cuda":
        return "its CUDA graphs have no effect without a GPU"
    return None


def _sets(listed: Mapping[str, Any]) -> str:
    options = [f"{name}={value!r}" for name, value in listed["options"].items()]
    return ", ".join(([f"mode {listed['mode']}"] if listed["mode"] else []) + options) or "-"
