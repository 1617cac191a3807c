"""Which parts of a module are repeated: blocks of one structure, as a transformer's layers are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from compile_callbacks._utils.errors import warn_user
from compile_callbacks.runtime.fsdp import strip_fsdp1_names
from compile_callbacks.runtime.target import Target, call_targets

Repeated = Literal["repeated"]
REPEATED: Repeated = "repeated"
"""As the ``targets`` argument: repeated blocks, which share one graph. In a list it is a name like others."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_SHOWN = 3  # more places than this are no help in a name


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """Blocks of one structure that share one compiled function.

    Attributes:
        name: What reports call them, ``"encoder.layers.*"``.
        members: The blocks, each of them once.
        count: How many places they stand in.
        asked_for: Whether the user asked for a shared graph (``targets="repeated"``).
    """

    name: str
    members: tuple[Target, ...]
    count: int
    asked_for: bool = False

    def label(self, graphs: int) -> str:
        """The name of the blocks in a report, with the number of their graphs."""
        compiled = {0: "", 1: ", one graph"}.get(graphs, f", {graphs} graphs")
        return f"{self.name} ({self.count} blocks{compiled})"


Compiled: TypeAlias = Target | RepeatedBlocks
"""A target or a group of repeated blocks, which has one compiled function."""


def group_targets(
    root: nn.Module, targets: Sequence[Target], shares: Callable[[Target], bool] = lambda target: True
) -> Sequence[Compiled]:
    """Leave out targets that cannot be compiled, with a warning, and let those that look alike share a graph.

    Args:
        root: The module that the targets are in.
        targets: The targets; each of them counts once.
        shares: Whether a target may share a graph.
    """
    once: dict[tuple[int, str | None], Target] = {}
    for target in targets:
        once.setdefault((id(target.module), target.method), target)
    for key, target in list(once.items()):
        if (reason := target.uncompilable_reason()) is not None:
            del once[key]
            _warn_on_rank_zero("CC104", f"target {target.name!r} is not compiled: {reason}")
    alike: dict[Any, list[Target]] = {}
    for key, target in once.items():
        alike.setdefault(_look(target) if shares(target) else key, []).append(target)
    return [found[0] if len(found) == 1 else _sharing(root, found) for found in alike.values()]


def repeated_blocks(root: nn.Module) -> list[RepeatedBlocks]:
    """Return the repeated blocks of a module. If FSDP shards them, see `call_targets`."""
    alike: dict[Any, list[Target]] = {}
    for blocks in find_repetitions(root):
        for path, block in blocks.items():
            for target in call_targets(path, block):
                if target.uncompilable_reason() is None:
                    alike.setdefault(_look(target), []).append(target)
    return [_sharing(root, found) for found in alike.values()]


def _look(target: Target) -> Any:
    return target.method, target.own_function, structure_of(target.module)


def _warn_on_rank_zero(code: str, message: str) -> None:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        warn_user(code, message)


def _sharing(root: nn.Module, targets: Sequence[Target]) -> RepeatedBlocks:
    once: dict[int, Target] = {}
    for target in targets:
        once.setdefault(id(target.module), target)
    return RepeatedBlocks(name_of(root, [target.name for target in targets]), tuple(once.values()), len(targets))


def blocks_or_error(root: nn.Module) -> list[RepeatedBlocks]:
    """Return the repeated blocks for ``targets="repeated"``.

    Raises:
        ValueError: Nothing is repeated.
    """
    if found := repeated_blocks(root):
        return [replace(blocks, asked_for=True) for blocks in found]
    raise ValueError(
        f"targets={REPEATED!r} finds nothing to share a graph in {type(root).__name__}: no two blocks in its "
        "Sequentials and in its lists and dicts of modules have the same classes and shapes of weights. Give names of "
        f"its parts, or None to have it compiled as a whole (targets=[{REPEATED!r}] is the part of that name)"
    )


def find_repetitions(root: nn.Module) -> list[dict[str, nn.Module]]:
    """The repeated blocks of a module; of nested blocks, the outermost.

    A block is a member of a ``Sequential``, ``ModuleList`` or ``ModuleDict``, has parameters, and is more than a single
    layer of ``torch.nn``. Blocks are alike that have the same classes throughout, and parameters and buffers of the
    same names, shapes and dtypes, anywhere in the root.

    Args:
        root: The module to look in; it is no block itself.

    Returns:
        Blocks that are alike, by their dotted names in the root module. A block that stands in several places is there
        under each.
    """
    alone: set[Any] = set()
    while True:  # a module that is not repeated may contain repeated ones
        alike: dict[Any, dict[str, nn.Module]] = {}
        for path, block in _blocks(root, "", alone):
            alike.setdefault(structure_of(block), {})[path] = block
        if not (single := {structure for structure, blocks in alike.items() if len(blocks) < 2}):
            return list(alike.values())
        alone |= single


def _blocks(parent: nn.Module, prefix: str, alone: set[Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in parent._modules.items():  # not named_children(), which names a child once
        if child is None:
            continue
        path = f"{prefix}{name}"
        if isinstance(parent, _CONTAINERS) and _is_block(child) and structure_of(child) not in alone:
            yield path, child
        else:
            yield from _blocks(child, f"{path}.", alone)


def _is_block(module: nn.Module) -> bool:
    has_forward = type(module).forward is not nn.Module.forward
    is_layer = not module._modules and type(module).__module__.startswith("torch.nn.")
    return has_forward and not is_layer and next(module.parameters(), None) is not None


def structure_of(module: nn.Module) -> Any:
    """What modules have in common that are alike: classes, names, shapes and dtypes; hashable."""
    parts = tuple((name, type(part)) for name, part in module.named_modules(remove_duplicate=False))
    weights = tuple(
        (name, None if is_lazy(tensor) else tuple(tensor.shape), tensor.dtype)
        for named in (module.named_parameters, module.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    )
    return parts, weights


# ---------------------------------------------------------------------------------------------- names


def name_of(root: nn.Module, paths: Sequence[str]) -> str:
    """What to call parts of a module that are alike.

    Returns:
        One glob for all, ``"encoder.layers.*"``, if it matches no other module with parameters; else the names of all.
    """
    split = [path.split(".") for path in paths]
    if len({len(names) for names in split}) == 1:
        glob = [names[0] if len(set(names)) == 1 else "*" for names in zip(*split, strict=True)]
        named = root.named_modules(remove_duplicate=False)
        others = {strip_fsdp1_names(path) for path, part in named if path and _has_parameters(part)}
        if sum(_means(glob, path.split(".")) for path in others) == len(paths):
            return ".".join(glob)
    by_parent = groupby(sorted(paths, key=_parent), key=_parent)
    places = [".".join(filter(None, (parent, _listed(of_parent)))) for parent, of_parent in by_parent]
    return " + ".join(places[:_SHOWN]) + (f" + {len(places) - _SHOWN} more" if len(places) > _SHOWN else "")


def _listed(paths: Iterable[str]) -> str:
    """The last parts of names in braces, numbers that follow one another as a range: ``{1-3}``."""
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


def _means(glob: list[str], names: list[str]) -> bool:
    return len(glob) == len(names) and all(a in ("*", b) for a, b in zip(glob, names, strict=True))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
