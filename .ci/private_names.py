"""Lists the private parts of torch that the package uses, by mechanism, and the places that change them.

    python .ci/private_names.py

A private name has a part that begins with ``_``, such as ``torch._dynamo.config``. Settings, and attributes of a class
or of a result, do not count. ``torch.utils._pytree`` and operators count as public. A changed place is a mechanism that
assigns to a private attribute, patches a function or changes a list of torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1] / "compile_callbacks"
_OWN = {"self", "cls"}


class Use(NamedTuple):
    """A use of a private part of torch."""

    kind: str  # "name", "attribute" or "change"
    what: str
    port: str  # the argument of ``optional``, or the name of the file
    place: str
    line: int


def uses_in(path: Path) -> Iterator[Use]:
    """Yield the uses in one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    imported = {"torch": "torch"} | {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch"
        for alias in node.names
    }
    blocks = {  # by function: the port of ``optional_block(port, function)``
        ast.unparse(node.args[1]): ast.literal_eval(node.args[0])
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("optional_block") and len(node.args) > 1
    }
    prefixes = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}

    def name_of(node: ast.AST) -> str:
        root, _, rest = ast.unparse(node).partition(".")
        return f"{imported[root]}.{rest}" if root in imported else ""

    for top in tree.body:
        port = _decorated(top) or blocks.get(getattr(top, "name", "")) or path.stem
        place = f"{path.relative_to(ROOT)}:{getattr(top, 'name', top.lineno)}"
        for node in ast.walk(top):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and id(node) not in prefixes:
                names = [name_of(node)]
            else:
                names = []
            yield from (Use("name", short, port, place, node.lineno) for name in names if (short := _shortened(name)))
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                root = re.split(r"\W", ast.unparse(node))[0]
                if root not in imported and ast.unparse(node.value) not in _OWN:
                    yield Use("attribute", node.attr, port, place, node.lineno)
            if path.parent.name == "_torch":
                yield from (Use("change", what, port, place, node.lineno) for what in _changed(node))


def _shortened(name: str) -> str:
    """Return a private name without the attributes of a class, a setting or a result, or an empty string."""
    parts = re.split(r"[^\w.]", name)[0].strip(".").split(".")
    for i, part in enumerate(parts):
        if part == "config" or (part[:1].isupper() and not parts[min(i + 1, len(parts) - 1)].startswith("_")):
            parts = parts[: i + 1]
            break
    is_public = parts[:1] != ["torch"] or parts[1] == "ops" or parts[:3] == ["torch", "utils", "_pytree"]
    private = [part for part in parts if re.match(r"_[A-Za-z]", part)]
    is_module = ".".join(parts) in _MODULES
    return "" if is_public or not private or is_module else ".".join(parts)


_MODULES = {"torch._C._functorch", "torch._inductor.compile_fx", "torch._inductor.custom_graph_pass"}
_MODULES |= {f"torch.{name}" for name in ("_C", "_dynamo", "_functorch", "_guards", "_inductor", "_subclasses")}
_MODULES |= {
    "torch.utils._triton",
    "torch.utils._python_dispatch",
    "torch._subclasses.meta_utils",
    "torch._dynamo.exc",
    "torch._inductor.cpu_vec_isa",
}


def _decorated(node: ast.stmt) -> str | None:
    for decorator in getattr(node, "decorator_list", ()):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("optional"):
            return str(ast.literal_eval(decorator.args[0]))
    return None


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield what a statement of `_torch` changes in torch, which is not a local variable or an attribute of `self`."""
    targets = getattr(node, "targets", None) or [node.target] if isinstance(node, _STATEMENTS) else []
    yield from (text for text in map(ast.unparse, targets) if _CHANGED.search(text) and not text.startswith("self."))
    if isinstance(node, ast.Call) and _CHANGES.search(ast.unparse(node.func)):
        yield ast.unparse(node)


_STATEMENTS = (ast.Assign, ast.AugAssign, ast.Delete)
_CHANGED = re.compile(r"\._\w+$|_idxs$|weakrefs$")
_CHANGES = re.compile(r"^patch|^functions\.|^register_bytecode_hook$|^vars\(tensor\)\.pop$|^PyCodeCache\.modules\.")


def uses() -> list[Use]:
    """Return all uses in the package."""
    return [use for path in sorted(ROOT.rglob("*.py")) for use in uses_in(path)]


if __name__ == "__main__":
    found = uses()
    for kind in ("name", "attribute", "change"):
        of_kind: dict[str, set[str]] = {}
        for use in found:
            if use.kind == kind:
                key = use.port if kind == "change" else use.what
                of_kind.setdefault(key, set()).add(use.what if kind == "change" else f"{use.port} ({use.place})")
        print(f"\n{kind}s: {len(of_kind)}")
        for what, where in sorted(of_kind.items()):
            print(f"  {what}: {', '.join(sorted(where))}")
