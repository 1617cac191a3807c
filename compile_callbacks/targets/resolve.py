"""Resolves the names in the ``targets`` argument to `Target` objects of a module."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from compile_callbacks._utils.errors import with_code
from compile_callbacks._utils.messages import unknown
from compile_callbacks.targets.fsdp import innermost_fsdp_units
from compile_callbacks.targets.repeated import group_targets, is_block
from compile_callbacks.targets.target import Callee, Target, callees_of


def check_target_names(targets: object) -> tuple[str, ...] | None:
    """Check the ``targets`` argument."""
    if targets is None:
        return None
    if targets == "repeated":
        message = (
            "targets='repeated' is not supported. Name the blocks with a glob, as in targets=['net.layers.*'], so that "
            "they share a compiled function, or omit targets and set background=True, so that training goes on during "
            "the compile. targets=['repeated'] names a submodule"
        )
        raise ValueError(with_code("CC201", message))
    names = (targets,) if isinstance(targets, str) else targets
    if not isinstance(names, Sequence):
        message = f"targets={targets!r} must be a list of names, or None for the default targets"
        raise TypeError(with_code("CC202", message))
    for name in names:
        if not isinstance(name, str):
            message = f"targets={targets!r} has {name!r} of the type {type(name).__name__}, which is not a name"
            raise TypeError(with_code("CC202", message))
        if not name:
            message = f"targets={targets!r} has an empty name; the call of the module itself is 'forward'"
            raise ValueError(with_code("CC201", message))
    if not names:
        raise ValueError(with_code("CC201", "targets is empty; list names, or use None for the default targets"))
    return tuple(names)


def resolve_targets(root: nn.Module, names: Sequence[str], *, changed: bool = False) -> list[Target]:
    """Return the targets for a checked ``targets`` argument. A ``changed`` module may no longer have each name.

    Names are dotted names of submodules or methods, or globs of submodule names. ``"forward"`` is the call of the root
    itself. If FSDP shards a module in parts, its innermost parts replace the module.

    Blocks of the same structure that globs match share a compiled function. Sharded targets also share a compiled
    function, because they already do not support the settings that sharing excludes.
    """
    callees: list[Callee] = []
    of_globs = set[int]()
    for name in names:
        with contextlib.suppress(ValueError) if changed else contextlib.nullcontext():
            matching = _matching(root, name)
            callees += matching
            of_globs |= {id(callee.module) for callee in matching if set(name) & set("*?[")}
    shares = lambda callee: callee.sharded or (id(callee.module) in of_globs and is_block(callee.module))  # noqa: E731
    return group_targets(root, callees, shares)


def _matching(root: nn.Module, name: str) -> list[Callee]:
    if name == "forward":
        return callees_of("forward", root)
    modules = {path: module for path, module in root.named_modules(remove_duplicate=False) if path}
    if paths := _outermost(path for path in modules if fnmatch.fnmatchcase(path, name)):
        return [callee for path in paths for callee in callees_of(path, modules[path])]
    owner_path, _, method = name.rpartition(".")
    owner = modules.get(owner_path) if owner_path else root
    if owner is None or not _has_method(owner, method):
        raise ValueError(with_code("CC201", unknown("targets", name, ["forward", *modules])))
    if method == "forward" and innermost_fsdp_units(owner):
        return callees_of(name, owner)
    return [Callee(name, owner, method)]


def _outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are not within another path. A glob may match submodules, because ``*`` matches dots."""
    outermost: list[str] = []
    for path in paths:
        if not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost.append(path)
    return outermost


def _has_method(module: nn.Module, name: str) -> bool:
    """Return whether a module has a method, without evaluating its properties."""
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, name)
    return callable(vars(module).get(name, getattr(type(module), name, None)))
