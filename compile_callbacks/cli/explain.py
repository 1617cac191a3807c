"""Explain a warning or an error by its code. Without CODE, list all codes. The docs page has the same texts."""

from __future__ import annotations

import difflib
import importlib.resources
import re
import sys
from typing import Any

EXPLANATIONS = importlib.resources.files(__package__ or "") / "explanations"
"""The folder of the Markdown files, which may be in a zip file. Each file has a title, and an entry ``## CC101: Title``
for each code of its range."""

_ENTRY = re.compile(r"^## (CC\d{3}): ([^\n]+)\n\n(.+?)\n*(?=^## |\Z)", re.MULTILINE | re.DOTALL)

ARGUMENTS: dict[str, dict[str, Any]] = {
    "code": {"nargs": "?", "metavar": "CODE", "help": "a code at the end of a message, such as CC104"}
}


def read_entries() -> dict[str, tuple[str, str]]:
    """Read the title and the text of each code, in the order of the files."""
    paths = sorted(EXPLANATIONS.iterdir(), key=lambda path: path.name)
    files = [path.read_text(encoding="utf-8") for path in paths if path.name.endswith(".md")]
    return {code: (title, text) for file in files for code, title, text in _ENTRY.findall(file)}


def run(code: str | None) -> int:
    """Print the entry of a code, or the list of all codes."""
    entries = read_entries()
    if not code:
        sys.stdout.writelines(f"{each}  {title}\n" for each, (title, _) in entries.items())
    elif code.upper() in entries:
        title, text = entries[code.upper()]
        sys.stdout.write(f"{code.upper()}: {title}\n\n{text.replace('**', '')}\n")
    else:
        near = ", ".join(difflib.get_close_matches(code.upper(), entries))
        hint = f"codes near it: {near}" if near else "`compile-callbacks explain` lists all codes"
        raise ValueError(f"there is no code {code!r}; {hint}")
    return 0
