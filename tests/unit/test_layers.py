"""The rules of the architecture: public names, lazy imports, and the imports in the syntax trees of all files."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import compile_callbacks

ROOT = Path(compile_callbacks.__file__).parent
USES = runpy.run_path(str(ROOT.parent / ".ci/private_names.py"))["uses"]()
ALLOWED = {
    *("_asdict", "_replace"),  # of named tuples
    *("_buffers", "_modules", "_base"),  # nn.Module and Tensor, since the first versions of torch
    *("_compiler_ctx", "_getframe", "_compiles", "_key", "_module", "_samples"),  # of Lightning, of Python, and ours
}
"""Private attributes and names that other folders than ``_torch`` may use."""
MAY_IMPORT_LIGHTNING = {"callbacks", "testing.py", "report/loggers.py"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports, also inside functions and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


IMPORTS = {path: imports(path) for path in sorted(ROOT.rglob("*.py"))}


def test_one_folder_uses_torchs_private_parts_and_callbacks_testing_and_loggers_import_lightning():
    outside = {(use.place, use.what) for use in USES if not use.place.startswith("_torch/")}
    assert {(place, what) for place, what in outside if what not in ALLOWED} == set()
    for path, found in IMPORTS.items():
        place, lightning = path.relative_to(ROOT), {name for name in found if name.split(".")[0] == "lightning"}
        assert not lightning or {str(place), place.parts[0]} & MAY_IMPORT_LIGHTNING, f"{place} imports {lightning}"


def test_nothing_private_is_read_when_the_package_is_imported():
    for path in sorted((ROOT / "_torch").glob("*.py")):
        tree = ast.parse(path.read_text())
        bodies = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {line for node in bodies for line in range(node.body[0].lineno, node.end_lineno + 1)}
        uses = [use for use in USES if use.place.startswith(f"_torch/{path.name}:") and use.kind == "name"]
        assert [use for use in uses if use.line not in inside] == []


def test_the_package_uses_few_private_parts_of_torch():
    """``.ci/private_names.py`` prints both lists."""
    counts = [len({use.what for use in USES if use.kind == "name"}), len({u.port for u in USES if u.kind == "change"})]
    assert (counts[0] <= 61, counts[1] <= 10) == (True, True), counts


def test_no_import_points_up():
    """Neither between the rows of the guide's table, nor in a circle of files."""
    files = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): found
        for path, found in IMPORTS.items()
        if path != ROOT / "__init__.py"
    }
    graph = {name: (found & set(files)) - {name} for name, found in files.items()}
    # ``from compile_callbacks._torch import autograd`` needs the file, and not what else the folder imports.
    for name, found in graph.items():
        graph[name] = {module for module in found if not any(sub.startswith(f"{module}.") for sub in found)}
    TopologicalSorter(graph).prepare()  # raises if there is a circle
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in guide.splitlines() if row.startswith("| `")]
    height = {layer: -number for number, row in enumerate(rows) for layer in row}
    layer_of = {name: name.split(".")[1] for name in graph}
    assert set(height) == set(layer_of.values()) - {"__main__"}
    edges = [(name, imported) for name, found in graph.items() for imported in found]
    up = [(name, imported) for name, imported in edges if height.get(layer_of[name], 1) < height[layer_of[imported]]]
    assert up == []


def test_workarounds_are_deleted_when_the_oldest_torch_does_not_need_them():
    """A workaround is ``Workaround (torch<2.13; pytorch#1): reason`` or ``Workaround (until condition; no issue)``."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    (torch,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "torch"]
    oldest = min(Version(specifier.version) for specifier in torch.specifier)
    texts = [path.read_text() for path in (ROOT / "_torch").glob("*.py") if path.name != "__init__.py"]
    workarounds = [condition for text in texts for condition in re.findall(r"Workaround \(([^)]+)\)?", text)]
    assert len(workarounds) > 10
    told = re.compile(r"(torch<\d+\.\d+|until .+);\s+(no issue|pytorch#\d+(, pytorch#\d+)*)", re.DOTALL)
    assert [w for w in workarounds if not told.fullmatch(w)] == []
    versions = [w.partition(";")[0].removeprefix("torch<") for w in workarounds if w.startswith("torch<")]
    fixed = [version for version in versions if Version(version) <= oldest]
    assert fixed == [], "delete these workarounds"


NAMES = [
    *("CompileError", "CompileReport", "CompileWarning", "ExportError", "GraphPass"),
    *("InductorBackend", "InductorCompile", "InductorConfig", "PhaseReport", "Tune", "compile_phases", "export"),
    *("graph_pass", "load_exported", "report_of", "restore", "templates"),
]

PROGRAM = """
import sys, compile_callbacks
print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}))
"""


def test_import_of_the_package_imports_nothing_else():
    environment, command = os.environ | {"PYTHONPATH": str(ROOT.parent)}, [sys.executable, "-S", "-c", PROGRAM]
    assert subprocess.check_output(command, env=environment, text=True).split() == ["compile_callbacks"]


def test_public_names_exist_and_no_submodule_has_one_of_them():
    assert compile_callbacks.__all__ == NAMES
    assert [name for name in NAMES if getattr(compile_callbacks, name) is None] == []
    with pytest.raises(AttributeError, match="has no attribute 'find_nodes'"):
        _ = compile_callbacks.find_nodes
    assert {path.stem for path in ROOT.iterdir()} & set(NAMES) == set()
