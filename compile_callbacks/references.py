"""Objects by the name that they can be imported by: how graph passes and settings stand in a file."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any


def reference_to(thing: Any, module_name: str) -> str:
    """``"module:name"`` of an object that stands in a module.

    Args:
        thing: The object.
        module_name: The module to look in: that of its class or function.

    Raises:
        ValueError: No name of the module holds it.
    """
    module = sys.modules.get(module_name)
    for name, value in vars(module).items() if module is not None else ():
        if value is thing:
            return f"{module_name}:{name}"
    raise ValueError(
        f"{thing!r} cannot be written down: module {module_name!r} has no name for it; make it there, at the top level"
    )


def resolve(reference: object) -> Any:
    """The object that a reference names.

    Raises:
        TypeError: Not a string.
        ValueError: Neither ``"module:name"`` nor ``"module.name"``, or there is no such module or name.
    """
    if not isinstance(reference, str):
        raise TypeError(f"{reference!r} must be a string of the form 'module:name', not {type(reference).__name__}")
    module_name, _, name = reference.partition(":") if ":" in reference else reference.rpartition(".")
    if not (module_name and name):
        raise ValueError(f"{reference!r} must be of the form 'module:name'")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{reference!r} cannot be imported: {error}") from error


def class_and_arguments(
    value: Mapping[str, Any], argument: str, kinds: tuple[type, ...]
) -> tuple[type, dict[str, Any]]:
    """The class that a mapping names, as LightningCLI's YAML does, and what it is to be made with.

    Args:
        value: ``class_path``, the class, and ``init_args``, a mapping that may be missing.
        argument: The argument that it was given for.
        kinds: What the class must be, or be derived from.

    Raises:
        TypeError: ``class_path`` is no string, ``init_args`` no mapping, or the class none of the kinds.
        ValueError: Another key, or a class that cannot be imported.
    """
    if more := [name for name in value if name not in ("class_path", "init_args")]:
        raise ValueError(f"{argument} has {more[0]!r} beside class_path; arguments of the class go into init_args")
    init_args = value.get("init_args") or {}
    if not isinstance(init_args, Mapping):
        raise TypeError(f"{argument}: init_args={init_args!r} must be a mapping, not {type(init_args).__name__}")
    try:
        found = resolve(value["class_path"])
    except ValueError as error:
        raise ValueError(f"{argument}: class_path {error}") from error
    if not (isinstance(found, type) and issubclass(found, kinds)):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{argument}: class_path={value['class_path']!r} is no {names}")
    return found, dict(init_args)
