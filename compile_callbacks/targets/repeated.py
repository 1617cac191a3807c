"""Groups repeated blocks of a module, such as the layers of a transformer, which share a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import distributed, nn
from torch.nn.parameter import is_lazy

from compile_callbacks._utils.errors import warn_user
from compile_callbacks.targets.fsdp import strip_fsdp1_names
from compile_callbacks.targets.target import Callee, Target

BLOCK_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""The modules whose members may be repeated blocks."""


def group_targets(
    root: nn.Module, callees: Iterable[Callee], shares: Callable[[Callee], bool] = lambda callee: True
) -> list[Target]:
    """Return the targets for callees. Callees of the same structure become one target.

    Duplicates count once. The function warns about a callee that torch cannot compile, and omits it. ``shares`` returns
    whether a callee may share a compiled function.
    """
    once: dict[tuple[int, str | None], Callee] = {}
    for callee in callees:
        once.setdefault((id(callee.module), callee.method), callee)
    alike: dict[Any, list[Callee]] = {}
    for key, callee in once.items():
        if (reason := callee.uncompilable_reason()) is None:
            structure = (callee.method, callee.override, structure_of(callee.module))
            alike.setdefault(structure if shares(callee) else key, []).append(callee)
        elif not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
            warn_user("CC104", f"target {callee.name!r} is not compiled: {reason}")
    return [Target(name_of(root, [callee.name for callee in members]), tuple(members)) for members in alike.values()]


# ---------------------------------------------------------------------------------------------- structure


def is_block(module: nn.Module) -> bool:
    """Return whether a module has parameters and is more than one layer of ``torch.nn``."""
    has_forward = type(module).forward is not nn.Module.forward
    is_layer = not module._modules and type(module).__module__.startswith("torch.nn.")
    return has_forward and not is_layer and next(module.parameters(), None) is not None


def structure_of(module: nn.Module) -> Any:
    """Return a hashable description of the structure of a module: classes, names, shapes and dtypes."""
    classes = tuple((name, type(submodule)) for name, submodule in module.named_modules(remove_duplicate=False))
    weights = tuple(
        (name, None if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype)
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    )
    return classes, weights


# ---------------------------------------------------------------------------------------------- names


def name_of(root: nn.Module, paths: Sequence[str]) -> str:
    """Return the name of several modules for reports, if possible as one glob, such as ``"encoder.layers.*"``.

    The glob must match no other module with parameters, because names of targets differ. Otherwise, the name is that of
    the first module, with the number of the others.
    """
    if len(paths) == 1:
        return paths[0]
    split = [path.split(".") for path in paths]
    if len({len(names) for names in split}) == 1:
        glob = [names[0] if len(set(names)) == 1 else "*" for names in zip(*split, strict=True)]
        named = root.named_modules(remove_duplicate=False)
        others = {strip_fsdp1_names(path) for path, part in named if path and next(part.parameters(), None) is not None}
        if sum(_matches(glob, path.split(".")) for path in others) == len(paths):
            return ".".join(glob)
    return f"{paths[0]} + {len(paths) - 1} more"


def _matches(glob: list[str], names: list[str]) -> bool:
    return len(glob) == len(names) and all(a in ("*", b) for a, b in zip(glob, names, strict=True))
