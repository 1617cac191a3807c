"""What a failure of the compiler was, in a line that a person can act on."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path


def describe_failure(error: BaseException) -> str:
    """The type and message of the first error behind ``error``; what a failed program printed, too.

    Torch wraps errors in its own, and hands on the command line of a C++ compiler that failed, which is long and
    says nothing; what the compiler itself said is the cause.
    """
    cause = _first_of_chain(error)
    if isinstance(cause, subprocess.CalledProcessError):
        return f"{_program_ended(cause)}: {_printed(cause) or 'it printed nothing'}"
    return f"{type(cause).__name__}: {cause}".strip()


def in_one_line(text: str, width: int = 200) -> str:
    """A text without line breaks, cut off where it is longer than ``width`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def _first_of_chain(error: BaseException) -> BaseException:
    while (cause := getattr(error, "inner_exception", None) or error.__cause__) is not None and cause is not error:
        error = cause
    return error


def _program_ended(error: subprocess.CalledProcessError) -> str:
    command = error.cmd.split() if isinstance(error.cmd, str) else error.cmd
    program = Path(str(command[0])).name
    if error.returncode < 0:
        return f"{program} was ended by {signal.Signals(-error.returncode).name}"
    return f"{program} ended with exit status {error.returncode}"


def _printed(error: subprocess.CalledProcessError) -> str:
    texts = [
        text.decode(errors="replace") if isinstance(text, bytes) else text for text in (error.stdout, error.stderr)
    ]
    return "\n".join(text.strip() for text in texts if text and text.strip())
