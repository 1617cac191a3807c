"""Finds the repeated blocks of a module, such as the layers of a transformer, and marks them as regions of a graph."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_callbacks import _torch
from compile_callbacks._utils.errors import warn_user, with_code
from compile_callbacks.targets.fsdp import strip_fsdp1_names
from compile_callbacks.targets.target import Callee, Target

Repeated = Literal["repeated"]
REPEATED: Repeated = "repeated"
"""The value of ``targets`` for repeated blocks. In a list, it is an ordinary name."""

BLOCK_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""The modules whose members may be repeated blocks."""

_SHOWN = 3  # the maximum number of places in a name


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
        elif _is_first_process():
            warn_user("CC104", f"target {callee.name!r} is not compiled: {reason}")
    return [Target(name_of(root, [callee.name for callee in members]), tuple(members)) for members in alike.values()]


def group_repeated(root: nn.Module, callees: Iterable[Callee]) -> list[Target]:
    """Return the targets for ``targets="repeated"``: the repeated blocks in each callee become regions of its graph.

    Callees without repeated blocks become one target if they have the same structure. If the steps call each block, the
    blocks themselves are such callees.
    """
    regions = {callee: _regions_of(callee) for callee in callees}
    targets = group_targets(root, regions, lambda callee: not regions[callee])
    return [replace(target, regions=regions[target.members[0]], asked_for=True) for target in targets]


def _regions_of(callee: Callee) -> tuple[tuple[nn.Module, ...], ...]:
    """Return the repeated blocks of a callee that can be regions, by structure. A sharded callee has none."""
    if callee.sharded or callee.uncompilable_reason() is not None:
        return ()
    alike = (tuple(filter(_can_be_marked, blocks.values())) for blocks in find_repetitions(callee.module))
    return tuple(blocks for blocks in alike if len(blocks) > 1)


def check_is_repeated(root: nn.Module) -> None:
    """Refuse ``targets="repeated"`` for a module without repeated blocks."""
    if not find_repetitions(root):
        message = (
            f"targets={REPEATED!r} finds no repeated blocks in {type(root).__name__}: no two members of its "
            "Sequentials, ModuleLists and ModuleDicts have the same classes and shapes of weights. Name parts of the "
            f"module, or omit targets to compile the whole module (targets=[{REPEATED!r}] names a submodule)"
        )
        raise ValueError(with_code("CC120", message))


def _is_first_process() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank())


# ---------------------------------------------------------------------------------------------- regions


class RegionMarks:
    """Marks repeated blocks as regions of the graph that contains them, so that torch compiles their code once.

    A mark is an instance attribute ``forward`` that exists only during calls of the compiled function. No copy, pickle
    or checkpoint therefore contains a mark, and no mark remains after an exception.
    """

    def __init__(self, regions: Iterable[Iterable[nn.Module]]) -> None:
        modules = {block: None for blocks in regions for block in blocks}  # a block may have several names
        # One region for each class, because blocks share code only if they call the same function (torch 2.11).
        marked = {forward: _torch.regions.region_of(forward) for forward in {type(block).forward for block in modules}}
        self._marks = [(vars(block), types.MethodType(marked[type(block).forward], block)) for block in modules]
        self._lock = threading.Lock()
        self._calls = 0  # the number of running calls in all threads

    def around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``compiled`` with the marks installed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                if not self._calls:
                    for attributes, forward in self._marks:
                        attributes.setdefault("forward", forward)
                self._calls += 1
            try:
                return compiled(*args, **kwargs)
            finally:
                with self._lock:
                    self._calls -= 1
                    if not self._calls:
                        for attributes, forward in self._marks:
                            if attributes.get("forward") is forward:
                                del attributes["forward"]

        return call


def _can_be_marked(block: nn.Module) -> bool:
    """Return whether the ``forward`` of a block is the Python function of its class."""
    overrides = "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule)
    return not overrides and isinstance(type(block).forward, types.FunctionType)


# ---------------------------------------------------------------------------------------------- structure


def find_repetitions(root: nn.Module) -> list[dict[str, nn.Module]]:
    """Return the repeated blocks of a module by their dotted names, in one mapping for each structure.

    A block is a member of a ``Sequential``, ``ModuleList`` or ``ModuleDict``, has parameters, and is more than one
    layer of ``torch.nn``. Blocks have the same structure if their submodules have the same classes, and if their
    parameters and buffers have the same names, shapes and dtypes. They may have different parents, and several names.
    If blocks contain other blocks, the function returns the outermost blocks.
    """
    alone: set[Any] = set()
    while True:  # a block that occurs once may contain repeated blocks
        alike: dict[Any, dict[str, nn.Module]] = {}
        for path, block in _blocks(root, "", alone):
            alike.setdefault(structure_of(block), {})[path] = block
        if not (single := {structure for structure, blocks in alike.items() if len(blocks) < 2}):
            return list(alike.values())
        alone |= single


def _blocks(parent: nn.Module, prefix: str, alone: set[Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent._modules.items():  # not named_children(), which yields a shared child only once
        if child is None:
            continue
        path = f"{prefix}{name}"
        if isinstance(parent, BLOCK_CONTAINERS) and is_block(child) and structure_of(child) not in alone:
            yield path, child
        else:
            yield from _blocks(child, f"{path}.", alone)


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

    The glob must match no other module with parameters. Otherwise, the name consists of paths.
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
    by_parent = groupby(sorted(paths, key=_parent), key=_parent)
    places = [".".join(filter(None, (parent, _listed(of_parent)))) for parent, of_parent in by_parent]
    return " + ".join(places[:_SHOWN]) + (f" + {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")


def _listed(paths: Iterable[str]) -> str:
    """Return the last parts of names in braces, with consecutive numbers as a range: ``{1-3}``."""
    names = [path.rpartition(".")[2] for path in paths]
    if not all(name.isdigit() for name in names):
        return names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    ranges: list[list[int]] = []
    for number in sorted(map(int, names)):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    listed = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges)
    return names[0] if len(names) == 1 else "{" + listed + "}"


def _matches(glob: list[str], names: list[str]) -> bool:
    return len(glob) == len(names) and all(a in ("*", b) for a, b in zip(glob, names, strict=True))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
