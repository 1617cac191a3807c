"""`import compile_callbacks` imports neither torch nor Lightning; each public name is imported when it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import compile_callbacks

NAMES = """
AOTInductorExport CompileError CompileReport CompileWarning ExportError GraphPass InductorBackend InductorCompile
InductorConfig PhaseReport Tune compile_phases export graph_pass load_exported report_of restore templates
"""

PROGRAM = """
import sys

import compile_callbacks

print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}))
"""


def test_import_is_lazy():
    environment = os.environ | {"PYTHONPATH": str(Path(compile_callbacks.__file__).parents[1])}
    run = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.split() == ["compile_callbacks"]


def test_public_names_exist_and_no_submodule_has_one_of_them():
    assert compile_callbacks.__all__ == NAMES.split()
    for name in compile_callbacks.__all__:
        assert getattr(compile_callbacks, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'pattern_pass'"):
        _ = compile_callbacks.pattern_pass
    root = Path(compile_callbacks.__file__).parent
    assert {path.stem for path in root.iterdir()} & set(NAMES.split()) == set()
