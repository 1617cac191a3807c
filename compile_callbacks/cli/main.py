"""The command line: one subcommand a module."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from compile_callbacks.cli import bench as bench_command
from compile_callbacks.cli import doctor as doctor_command
from compile_callbacks.cli import explain as explain_command
from compile_callbacks.cli import modes as modes_command
from compile_callbacks.cli import report as report_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Its arguments; ``None`` for those of the process.

    Returns:
        The exit status: 0, 1 where ``doctor`` or ``bench`` found something that fails, or 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog="compile-callbacks", description="What compiling costs, gains and needs.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (doctor_command, modes_command, bench_command, report_command, explain_command):
        module.add_parser(subparsers)
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        status = command(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, `head` or a pager, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its exit
        return 0
    return status
