"""Writes the tables of the docs from the files that `all.py` wrote: ``python benchmarks/pages.py``.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->`` in a page of the docs or in the README.
``--check`` writes nothing, and fails if a table of a page is not that of its files.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tables import Row, print_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def read(pattern: str) -> list[dict[str, Any]]:
    """The results of the files that match, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def origin(results: Sequence[dict[str, Any]]) -> str:
    """The device, the versions, the date and the commit of results, which must be the same in all of them."""
    facts = {
        (
            result["device"],
            result["versions"]["torch"],
            result["versions"]["lightning"],
            result["date"],
            result["commit"],
        )
        for result in results
    }
    if len(facts) != 1:
        raise ValueError(f"the files of one table are of different machines or commits: {sorted(facts)}")
    device, torch_version, lightning, date, commit = facts.pop()
    return f"{device}, torch {torch_version}, Lightning {lightning}, commit {commit}, {date}:"


def background() -> str:
    """`background=True` against compiling by hand."""
    results = read("h100/background_*.json")
    lines = []
    for result in results:
        ways: dict[str, Row] = {row["way"]: row for row in result["rows"]}
        eager, hand, ours = ways["eager"], ways["by hand"], ways["background"]
        values = hand["longest_s"], ours["longest_s"], eager["steady_ms"], ours["meanwhile_ms"], hand["steady_ms"]
        lines.append([result["title"], *(f"{value:.1f}" for value in (*values, ours["steady_ms"]))])
    head = ["model, batch, mode", "longest step s, by hand", "in the background", "eager step ms", "step meanwhile ms",
            "compiled step ms, by hand", "in the background"]  # fmt: skip
    return f"{origin(results)}\n\n{table(head, lines)}"


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_table(head, lines)
    return text.getvalue()


TABLES: dict[str, Callable[[], str]] = {"background": background}


def main() -> None:
    """Write the tables of all pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text()
        new = SECTION.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}{found[4]}", text)
        if new != text:
            stale.append(str(page.relative_to(ROOT)))
            if not args.check:
                page.write_text(new)
    if stale and args.check:
        sys.exit(f"python benchmarks/pages.py changes these pages: {stale}")


if __name__ == "__main__":
    main()
