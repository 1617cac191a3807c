"""The command line: one subcommand a module."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from compile_callbacks import report_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: Its arguments; ``None`` for those of the process.

    Returns:
        The exit status: 0, or 2 for bad input.
    """
    parser = argparse.ArgumentParser(prog="compile-callbacks", description="What compiling cost and gained.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    report_command.add_parser(subparsers)
    args = parser.parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    return command(args)
