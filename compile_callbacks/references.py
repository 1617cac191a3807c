"""Objects by the name that they can be imported by: how graph passes stand in a file of settings."""

from __future__ import annotations

import importlib
import sys
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
        ValueError: Not of the form ``"module:name"``, or there is no such module or name.
    """
    if not isinstance(reference, str):
        raise TypeError(f"{reference!r} must be a string of the form 'module:name', not {type(reference).__name__}")
    module_name, colon, name = reference.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{reference!r} must be of the form 'module:name'")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{reference!r} cannot be imported: {error}") from error
