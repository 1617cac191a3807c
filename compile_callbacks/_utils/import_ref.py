"""Import references such as ``"module:name"``, by which a file names graph passes and classes of settings."""

from __future__ import annotations

import difflib
import pkgutil
import sys
from collections.abc import Mapping
from typing import Any

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import check_type


def reference_to(value: Any, module_name: str) -> str:
    """Return ``"module:name"`` for an object that is a global of the module."""
    for name, attribute in vars(sys.modules.get(module_name, object)).items():
        if attribute is value:
            return f"{module_name}:{name}"
    message = f"{value!r} cannot be saved: module {module_name!r} has no global name for it; create it at the top level"
    raise ValueError(with_code("CC207", message))


def resolve(reference: Any) -> Any:
    """Import the object that ``"module:name"`` or ``"module.name"`` refers to."""
    check_type("reference", reference, str, "a string of the form 'module:name'")
    module_name, _, name = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if not (module_name and name):
        raise ValueError(with_code("CC201", f"{reference!r} must be of the form 'module:name'"))
    try:
        return pkgutil.resolve_name(f"{module_name}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        similar = difflib.get_close_matches(getattr(error, "name", None) or "", dir(getattr(error, "obj", None)), n=1)
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(with_code("CC201", f"{reference!r} cannot be imported: {error}{hint}")) from error


def class_and_arguments(
    value: Mapping[str, Any], argument: str, kinds: tuple[type, ...]
) -> tuple[type, dict[str, Any]]:
    """Return the class and the constructor arguments of a mapping in the form of LightningCLI's YAML."""
    if more := [name for name in value if name not in ("class_path", "init_args")]:
        message = f"{argument} has {more[0]!r} next to class_path; arguments of the class belong in init_args"
        raise ValueError(with_code("CC201", message))
    init_args = value.get("init_args") or {}
    check_type(f"{argument}: init_args", init_args, Mapping, "a mapping")
    try:
        cls = resolve(value["class_path"])
    except ValueError as error:
        raise ValueError(f"{argument}: class_path {error}") from error
    if not (isinstance(cls, type) and issubclass(cls, kinds)):
        names = " or ".join(kind.__name__ for kind in kinds)
        message = f"{argument}: class_path={value['class_path']!r} must name a subclass of {names}"
        raise TypeError(with_code("CC202", message))
    return cls, dict(init_args)
