"""``compile-callbacks modes``: the modes and templates there are, and whether they work on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from compile_callbacks.command_line.mode_list import ListedMode, list_modes
from compile_callbacks.devices.device_option import parse_device
from compile_callbacks.reporting.console import print_texts

_DESCRIPTION = """\
List what train_mode and infer_mode take by name: the modes of the installed torch, and the templates of options. The
last column tells whether each does on this machine what it says.
"""


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
        data = {"device": str(device), "modes": [mode.to_dict() for mode in listed]}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        print_texts(("name", "kind", "for", f"on {device}"), [_row(mode) for mode in listed])
        sys.stdout.write("\n")
        print_texts(("name", "sets"), [(mode.name, _sets(mode)) for mode in listed])
    return 0


def _row(listed: ListedMode) -> tuple[str, ...]:
    lacks = (listed.lacks or "works").removeprefix(f"template {listed.name!r} ")
    return listed.name, listed.kind, listed.description, lacks


def _sets(listed: ListedMode) -> str:
    options = [f"{name}={value!r}" for name, value in listed.options.items()]
    return ", ".join(([f"mode {listed.mode}"] if listed.mode else []) + options) or "-"
