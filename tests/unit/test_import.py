"""`import compile_callbacks` imports no package that Lightning does not import, and its names lazily."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import compile_callbacks

PROGRAM = """
import sys
import lightning.pytorch

before = set(sys.modules)
import compile_callbacks
print(*sorted(set(sys.modules) - before))
"""


def test_import_adds_only_modules_of_the_package_and_is_lazy():
    environment = os.environ | {"PYTHONPATH": str(Path(compile_callbacks.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    added = run.stdout.splitlines()[-1].split()
    assert {name for name in added if name.split(".")[0] != "compile_callbacks"} == set()
    assert "compile_callbacks.callbacks.inductor_compile" not in added  # imported when it is used
