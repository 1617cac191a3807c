"""``compile-callbacks explain``: prints the entry of a code such as CC104. The docs page uses the same texts."""

from __future__ import annotations

import argparse
import difflib
import importlib.resources
import re
import sys
from typing import NamedTuple

EXPLANATIONS = importlib.resources.files(__package__ or "") / "explanations"
"""The folder of the Markdown files, which may be in a zip file. Each file has a title, and an entry ``## CC101: Title``
for each code of its range."""

_ENTRY = re.compile(r"^## (CC\d{3}): ([^\n]+)\n\n(.+?)\n*(?=^## |\Z)", re.MULTILINE | re.DOTALL)


class Entry(NamedTuple):
    """The explanation of a code."""

    code: str
    title: str
    text: str


def read_entries() -> dict[str, Entry]:
    """Read the entry of each code, in the order of the files."""
    paths = sorted(EXPLANATIONS.iterdir(), key=lambda path: path.name)
    files = [path.read_text(encoding="utf-8") for path in paths if path.name.endswith(".md")]
    return {code: Entry(code, *entry) for file in files for code, *entry in _ENTRY.findall(file)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = "Explain a warning or an error by its code. Without CODE, list all codes."
    parser.add_argument("code", nargs="?", metavar="CODE", help="a code at the end of a message, such as CC104")


def run(args: argparse.Namespace) -> int:
    """Print the entry of a code, or the list of all codes."""
    entries, code = read_entries(), (args.code or "").upper()
    if not code:
        sys.stdout.writelines(f"{entry.code}  {entry.title}\n" for entry in entries.values())
    elif code in entries:
        plain = entries[code].text.replace("**", "")
        sys.stdout.write(f"{code}: {entries[code].title}\n\n{plain}\n")
    else:
        near = ", ".join(difflib.get_close_matches(code, entries))
        hint = f"codes near it: {near}" if near else "`compile-callbacks explain` lists all codes"
        raise ValueError(f"there is no code {args.code!r}; {hint}")
    return 0
