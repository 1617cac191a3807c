"""``compile-callbacks`` and ``python -m compile_callbacks``: parses the arguments and runs a subcommand."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import compile_callbacks

_COMMANDS = {
    "doctor": "check whether torch.compile can work on this machine",
    "modes": "list modes and templates, and whether they work here",
    "report": "print the reports of earlier runs",
    "check": "compare the report of a run with a contract, for continuous integration",
    "explain": "explain a warning or an error by its code",
}
"""The subcommands. Each is a module of this package, whose docstring is the description. ``run`` takes the values of
``ARGUMENTS`` by name, and returns the exit status, or raises a `ValueError` for status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. The function imports only the subcommand's module, so that ``--help`` does not import torch."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="compile-callbacks", description="What compiling costs, gains and needs.")
    version = compile_callbacks.__version__ if "--version" in arguments else ""  # reading it takes time
    parser.add_argument("--version", action="version", version=f"compile-callbacks {version}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if arguments[:1] == [name]:
            command = importlib.import_module(f"compile_callbacks.cli.{name}")
            subparser.description = command.__doc__
            for argument, options in command.ARGUMENTS.items():
                subparser.add_argument(argument, **options)
            subparser.set_defaults(run=command.run)
    values = vars(parser.parse_args(arguments))
    try:
        status: int = values.pop("run")(**values)
        sys.stdout.flush()
    except ValueError as error:
        sys.stderr.write(f"compile-callbacks {arguments[0]}: {error}\n")
        return 2
    except BrokenPipeError:  # `head` or a pager has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout when it exits
        return 0
    return status
