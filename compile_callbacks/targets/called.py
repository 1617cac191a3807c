"""Lists the modules and methods that the steps of a module may call outermost, which may become targets."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Iterator

from torch import nn

from compile_callbacks import _torch
from compile_callbacks.targets.fsdp import innermost_fsdp_units
from compile_callbacks.targets.repeated import BLOCK_CONTAINERS, structure_of
from compile_callbacks.targets.target import CONTAINERS, Callee, callees_of, only_if_named

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAMEWORKS = (  # whose methods compute nothing, apart from forward
    "torch.distributed.",
    "torch.nn.modules.container.",
    "lightning.",
    "pytorch_lightning.",
    "lightning_fabric.",
)


def possible_callees(root: nn.Module) -> Iterator[Callee]:
    """Yield the call of the root, the modules that its steps may call, and the methods of its direct children.

    Members of lists and dicts of modules are direct children. The function yields no module without parameters, none
    that can be a target only by name, and none within a module that the user compiled.
    """
    of_root = Callee("forward", root)
    if of_root.uncompilable_reason() is None:
        yield of_root
    yield from _within(root, "", {id(root)}, direct=True)


def _within(parent: nn.Module, prefix: str, seen: set[int], *, direct: bool) -> Iterator[Callee]:
    for name, child in parent.named_children():
        if id(child) in seen or only_if_named(child) or _torch.dynamo.is_dynamo_wrapper(child):
            continue
        seen.add(id(child))
        if next(child.parameters(), None) is None:
            continue
        called = Callee(f"{prefix}{name}", child)
        if type(child).forward is not nn.Module.forward and called.uncompilable_reason() is None:
            yield called
        in_container = direct and isinstance(child, CONTAINERS)
        if direct and not in_container:
            yield from (Callee(f"{called.name}.{method}", child, method) for method in _own_methods(child))
        slot = vars(child).get("_compiled_call_impl")
        if getattr(slot, "compiled_by_user", slot) is None:
            yield from _within(child, f"{called.name}.", seen, direct=in_container)


def _own_methods(module: nn.Module) -> list[str]:
    """Return the names of the methods that ``nn.Module`` and the frameworks do not have.

    A shallow copy of the module would call the methods of the original, so ``forward`` is not in the list. The list
    contains no properties, generators, coroutines, static or class methods, and no functions that are cached, compiled
    or disabled.
    """
    names = {  # a set would have another order in each process
        name: None
        for cls in type(module).__mro__
        for name in vars(cls)
        if not (name.startswith("__") or f"{cls.__module__}.".startswith(_FRAMEWORKS) or hasattr(nn.Module, name))
    }
    return [name for name in names if _may_be_recorded(module, name)]


def _may_be_recorded(module: nn.Module, name: str) -> bool:
    function = inspect.getattr_static(module, name)
    if isinstance(getattr(function, "callee", None), Callee):  # the method is already a target
        return True
    if not isinstance(function, (types.FunctionType, types.MethodType)):
        return False
    code = getattr(inspect.unwrap(function), "__code__", None)
    suspends = code is None or code.co_flags & _SUSPENDED
    return not suspends and not _torch.dynamo.is_compiled_or_disabled(function)


def compilable_parts(called: Callee) -> list[Callee]:
    """Return a called module or method, or the innermost parts of the module if FSDP shards it."""
    if called.method is None or (called.method == "forward" and innermost_fsdp_units(called.module)):
        return callees_of(called.name, called.module)
    return [called]


def with_equal_blocks(root: nn.Module, called: Callee, callees: Iterable[Callee]) -> list[Callee]:
    """Return a callee and the equal modules at the same place of other members of a list of blocks.

    If ``layers.0.attention`` is called, the modules ``layers.*.attention`` share a compiled function.
    """
    if called.method is not None or "*" not in (place := _place(root, called.name)):
        return [called]
    same_place = [callee for callee in callees if callee.method is None and _place(root, callee.name) == place]
    structure = structure_of(called.module)
    return [callee for callee in same_place if structure_of(callee.module) == structure]


def _place(root: nn.Module, path: str) -> str:
    """Return the dotted name of a module with ``*`` instead of the names of members of lists of blocks."""
    names, parent = [], root
    for name in path.split("."):
        names.append("*" if isinstance(parent, BLOCK_CONTAINERS) else name)
        parent = parent._modules.get(name) or parent
    return ".".join(names)
