"""Finds `Target` objects: those that the ``targets`` argument names, and those that the steps of a module may call."""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parameter import is_lazy

from compile_callbacks import _torch
from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks._utils.messages import unknown
from compile_callbacks.targets.target import Callee, Target, compilable_parts, is_replaced, strip_fsdp1_names

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMEWORKS = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.")
"""The packages whose methods compute nothing, apart from ``forward``."""


def check_target_names(targets: object) -> tuple[str, ...] | None:
    """Check the ``targets`` argument."""
    if targets is None:
        return None
    names = (targets,) if isinstance(targets, str) else targets
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        message = f"targets={targets!r} must be a list of names, or None for the default targets"
        raise TypeError(with_code("CC202", message))
    if not names:
        raise ValueError(with_code("CC201", "targets is empty; list names, or use None for the default targets"))
    return tuple(names)


def resolve_targets(root: nn.Module, names: Sequence[str], *, changed: bool = False) -> list[Target]:
    """Return the targets for a checked ``targets`` argument. A ``changed`` module may no longer have each name."""
    callees: list[Callee] = []
    of_globs = set[int]()
    for name in names:
        with contextlib.suppress(ValueError) if changed else contextlib.nullcontext():
            matching = _matching(root, name)
            callees += matching
            of_globs |= {id(callee.module) for callee in matching if set(name) & set("*?[")}
    # Sharded targets share code, because they already do not support the settings that sharing excludes.
    return group_targets(root, callees, lambda callee: callee.sharded or id(callee.module) in of_globs)


def _matching(root: nn.Module, name: str) -> list[Callee]:
    if name == "forward":
        return compilable_parts(Callee(name, root))
    modules = {path: module for path, module in root.named_modules(remove_duplicate=False) if path}
    paths = [path for path in modules if fnmatch.fnmatchcase(path, name)]
    # A glob may match submodules of a match, because "*" matches dots.
    if outermost := [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]:
        return [callee for path in outermost for callee in compilable_parts(Callee(path, modules[path]))]
    owner_path, _, method = name.rpartition(".")
    owner = modules.get(owner_path) if owner_path else root
    # A property is not evaluated.
    if owner is None or not callable(vars(owner).get(method, getattr(type(owner), method, None))):
        raise ValueError(with_code("CC201", unknown("targets", name, ["forward", *modules])))
    return compilable_parts(Callee(name, owner, method))


# ---------------------------------------------------------------------------------------------- repeated blocks


def group_targets(
    root: nn.Module, callees: Iterable[Callee], shares: Callable[[Callee], bool] = lambda callee: True
) -> list[Target]:
    """Return a target for the callees of each structure, if ``shares`` lets them share code. Warn of other callees."""
    once: dict[Any, Callee] = {}
    for callee in callees:
        once.setdefault((id(callee.module), callee.method), callee)
    alike: dict[Any, list[Callee]] = {}
    for key, callee in once.items():
        if (reason := callee.uncompilable_reason()) is None:
            structure = (callee.method, structure_of(callee.module)) if shares(callee) else key
            alike.setdefault(structure, []).append(callee)
        elif not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
            warn_user("CC104", f"target {callee.name!r} is not compiled: {reason}")
    return [Target(_name_of(root, [callee.name for callee in members]), tuple(members)) for members in alike.values()]


def structure_of(module: nn.Module) -> Any:
    """Return a hashable description of the structure of a module: classes, names, shapes and dtypes."""
    classes = tuple((name, type(submodule)) for name, submodule in module.named_modules(remove_duplicate=False))
    weights = tuple(
        (name, None if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype)
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    )
    return classes, weights


def _name_of(root: nn.Module, paths: Sequence[str]) -> str:
    """Return the name of several modules: a glob that matches no other module with parameters, or the first name."""
    if len(paths) == 1:
        return paths[0]
    columns = [set(names) for names in zip(*(path.split(".") for path in paths), strict=False)]
    glob = ".".join(min(names) if len(names) == 1 else "*" for names in columns)
    pattern = re.compile(re.escape(glob).replace(r"\*", "[^.]*"))
    named = [path for path, part in root.named_modules(remove_duplicate=False) if any(True for _ in part.parameters())]
    matching = {path for path in map(strip_fsdp1_names, named) if pattern.fullmatch(path)}
    return glob if matching == set(paths) else f"{paths[0]} + {len(paths) - 1} more"


# ---------------------------------------------------------------------------------------------- called targets


def possible_callees(root: nn.Module) -> Iterator[Callee]:
    """Yield the call of the root, the modules that its steps may call, and the methods of its direct children."""
    of_root = Callee("forward", root)
    if of_root.uncompilable_reason() is None:
        yield of_root
    yield from _within(root, "", {id(root)}, direct=True)


def _within(parent: nn.Module, prefix: str, seen: set[int], *, direct: bool) -> Iterator[Callee]:
    for name, child in parent.named_children():
        if id(child) in seen or _only_if_named(child) or not any(True for _ in child.parameters()):
            continue
        seen.add(id(child))
        called = Callee(f"{prefix}{name}", child)
        if type(child).forward is not nn.Module.forward and called.uncompilable_reason() is None:
            yield called
        in_container = direct and isinstance(child, (nn.ModuleList, nn.ModuleDict))
        if direct and not in_container:
            yield from (Callee(f"{called.name}.{method}", child, method) for method in _own_methods(child))
        slot = vars(child).get("_compiled_call_impl")
        if getattr(slot, "compiled_by_user", slot) is None:
            yield from _within(child, f"{called.name}.", seen, direct=in_container)


def _only_if_named(module: nn.Module) -> bool:
    """Return whether a module is never a default target: one of TorchScript, a compiled one, a metric, or an RNN."""
    # Dynamo does not compile nn.RNN, nn.LSTM and nn.GRU (2.11 and 2.15). With allow_rnn, it unrolls the loop over time.
    if isinstance(module, (torch.jit.ScriptModule, nn.RNNBase)) or _torch.dynamo.is_dynamo_wrapper(module):
        return True
    classes = type(module).__mro__  # metrics only accumulate state
    return any(cls.__name__ == "Metric" and cls.__module__.startswith("torchmetrics.") for cls in classes)


def _own_methods(module: nn.Module) -> list[str]:
    """Return the names of the plain methods that ``nn.Module`` and the frameworks do not have, without ``forward``."""
    # A shallow copy of the module would call the methods of the original.
    methods = {
        name: function
        for cls in reversed(type(module).__mro__)
        for name, function in vars(cls).items()
        if not (name.startswith("__") or f"{cls.__module__}.".startswith(_FRAMEWORKS) or hasattr(nn.Module, name))
    }
    return [name for name, function in methods.items() if _is_plain(function) and not is_replaced(module, name)]


def _is_plain(function: object) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None) if isinstance(function, types.FunctionType) else None
    return code is not None and not (code.co_flags & _SUSPENDED or _torch.dynamo.is_compiled_or_disabled(function))


def with_equal_blocks(called: Callee, callees: Iterable[Callee]) -> list[Callee]:
    """Return the modules that equal ``layers.0.attention``, if it is called, among ``layers.*.attention``."""
    if called.method is not None or (place := _place(called)) == called.name:
        return [called]
    same_place = [callee for callee in callees if callee.method is None and _place(callee) == place]
    structure = structure_of(called.module)
    return [callee for callee in same_place if structure_of(callee.module) == structure]


def _place(callee: Callee) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", callee.name)
