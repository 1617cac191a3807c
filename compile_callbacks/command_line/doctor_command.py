"""``compile-callbacks doctor``: whether torch.compile can work on this machine, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from compile_callbacks.checks import Check, run_checks
from compile_callbacks.reporting.console import print_texts

_DESCRIPTION = """\
Look at everything that torch.compile needs, and compile an addition. Where something is missing, say what will not work
and how to mend it. The exit status is 1 if something failed; a missing GPU is no failure.
"""


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


def _print(checks: Sequence[Check], failed: int) -> None:
    print_texts(("check", "status", "found"), [(check.name, check.status, check.found) for check in checks])
    for check in checks:
        if check.consequence:
            sys.stdout.write(f"\n{check.name}: {check.consequence}\n  to mend it: {check.remedy}\n")
    sys.stdout.write(f"\n{failed} of {len(checks)} checks failed\n" if failed else "\nnothing failed\n")
