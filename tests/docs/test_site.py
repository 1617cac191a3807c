"""The build of the documentation site."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("link", "fails"), [("#page", False), ("#nowhere", True), ("missing.md", True)])
def test_make_docs_fails_on_a_link_that_leads_nowhere(link, fails, tmp_path):
    pytest.importorskip("mkdocs")
    recipe = re.search(r"^docs:.*\n\t\S+ \$\(BIN\)/mkdocs (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = re.search(r"^validation:\n(?: .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(f"site_name: site\ntheme: mkdocs\n{settings[0]}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# Page\n\n[link]({link})\n")
    command = [sys.executable, "-m", "mkdocs", *shlex.split(recipe[1])]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert bool(result.returncode) == fails, result.stderr
