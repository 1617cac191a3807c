"""``compile-callbacks doctor``: whether torch.compile can work on this machine, and how to fix what is missing."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from compile_callbacks.cli import machine_checks as machine
from compile_callbacks.cli import package_checks as packages
from compile_callbacks.cli.package_checks import Check, said
from compile_callbacks.report.console import print_texts

_DESCRIPTION = """\
Check everything that torch.compile needs, and compile an addition. If something is missing, say what will not work and
how to fix it. The exit status is 1 if a check failed; a missing GPU is not a failure.
"""

_CHECKS: dict[str, Callable[[], Check | None]] = {
    "python": packages.check_python,
    "torch": packages.check_torch,
    "torchvision": packages.check_torchvision,
    "triton": packages.check_triton,
    "lightning": packages.check_lightning,
    "tensorboard": packages.check_tensorboard,
    "GPU": machine.check_gpu,
    "C++ compiler": machine.check_cpp_compiler,
    "Python headers": machine.check_python_headers,
    "cache folder": machine.check_cache_folder,
    "compile on CPU": machine.check_compile_on_cpu,
    "compile on GPU": machine.check_compile_on_gpu,
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="check whether torch.compile can work on this machine", description=_DESCRIPTION
    )
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(command=doctor)


def doctor(args: argparse.Namespace) -> int:
    """Run the checks and print them.

    Returns:
        The exit status: 1 where a check failed.
    """
    checks = run_checks()
    failed = sum(check.status == "failed" for check in checks)
    if args.json:
        data = {"ok": not failed, "checks": [check.to_dict() for check in checks]}
        sys.stdout.write(json.dumps(data, indent=2) + "\n")
    else:
        _print(checks, failed)
    return 1 if failed else 0


def run_checks() -> list[Check]:
    """Run all checks, the ones that others depend on first. A check that raises is a warning."""
    checks = []
    for name, run in _CHECKS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the check reports what others warn about
            try:
                check = run()
            except Exception as error:
                check = Check(status="warning", found=f"the check failed: {said(error)}")
        if check is not None:
            checks.append(replace(check, name=name))
    return checks


def _print(checks: Sequence[Check], failed: int) -> None:
    print_texts(("check", "status", "found"), [(check.name, check.status, check.found) for check in checks])
    for check in checks:
        if check.consequence:
            sys.stdout.write(f"\n{check.name}: {check.consequence}\n  to fix it: {check.remedy}\n")
    sys.stdout.write(f"\n{failed} of {len(checks)} checks failed\n" if failed else "\nnothing failed\n")
