"""The architecture's rules, read off the syntax tree: torch's internals and Lightning have their places, and imports
point down."""

from __future__ import annotations

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import compile_callbacks

ROOT = Path(compile_callbacks.__file__).parent
SOURCES = sorted(ROOT.rglob("*.py"))
INTERNALS = {"_dynamo", "_inductor", "_functorch", "_ops", "_C"}
MAY_IMPORT_LIGHTNING = {"callbacks", "report/loggers.py"}


def imports(path: Path) -> set[str]:
    """Modules that a file imports when it runs, inside functions too."""
    tree = ast.parse(path.read_text())
    checked = {id(n) for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)}
    skipped = {id(c) for n in ast.walk(tree) if id(n) in checked for c in ast.walk(n)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def internal_attributes(path: Path) -> set[str]:
    """What a file reads of torch's internals as attributes, ``torch._inductor...``."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "torch"} & INTERNALS


def test_torchs_internals_are_touched_in_one_folder():
    for path in SOURCES:
        touched = {name for name in imports(path) if name.startswith("torch.") and set(name.split(".")) & INTERNALS}
        touched |= internal_attributes(path)
        assert not touched or path.parent.name == "_torch", f"{path.name} touches {touched}"


def test_lightning_is_imported_where_it_belongs():
    for path in SOURCES:
        used = {name for name in imports(path) if name.split(".")[0] == "lightning"}
        place = path.relative_to(ROOT)
        assert not used or {str(place), place.parts[0]} & MAY_IMPORT_LIGHTNING, f"{place} imports {used}"


def test_no_import_points_up():
    """Not between the rows of the guide's table, nor in a ring."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        layer = path.relative_to(ROOT).parts[0].removesuffix(".py")  # a folder is one layer
        found = {n.split(".")[1] for n in imports(path) if n.startswith("compile_callbacks.")}
        graph.setdefault(layer, set()).update(found - {layer})
    guide = (ROOT.parent / "CONTRIBUTING.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in guide.splitlines() if row.startswith("| `")]
    height = {layer: -number for number, row in enumerate(rows) for layer in row}
    assert set(height) == set(graph) - {"__init__", "__main__"}
    inner = {layer: found & set(height) for layer, found in graph.items() if layer in height}
    assert [(layer, name) for layer, found in inner.items() for name in found if height[name] > height[layer]] == []
    TopologicalSorter(inner).prepare()  # raises where there is a ring
