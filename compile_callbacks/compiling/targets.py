"""Which parts of a module are compiled: named by the user, or chosen."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from compile_callbacks import _torch
from compile_callbacks.choices import unknown
from compile_callbacks.compiling.repeated import find_repetitions, name_of, structure_of
from compile_callbacks.compiling.sharding import innermost_units, is_sharded, without_wrappers, wrapped_by_fsdp1
from compile_callbacks.links import checks_settings

Repeated = Literal["repeated"]
REPEATED: Repeated = "repeated"
"""As the ``targets`` argument: repeated blocks, which share one graph. In a list it is a name like others."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: what is called is what they hold


@dataclass(frozen=True, eq=False)
class Target:
    """Something that is compiled as one piece.

    Attributes:
        name: What reports call it: its dotted name in the root module, ``"forward"`` for the root's own.
        module: The module that is called.
        method: ``None`` for the module's call; else the method that is compiled instead. ``"forward"`` is what the
            module computes between its own hooks.
    """

    name: str
    module: nn.Module
    method: str | None = None

    @property
    def members(self) -> tuple[Target, ...]:
        """What is compiled with one function: this target alone."""
        return (self,)

    @property
    def function(self) -> Callable[..., Any]:
        """What the target does uncompiled, hooks included, as a function of the module."""
        function: Callable[..., Any] = getattr(type(self.module), self.method or "_call_impl")
        return function

    @property
    def eager(self) -> Callable[..., Any]:
        """What the target does uncompiled, hooks included."""
        call: Callable[..., Any] = self.function.__get__(self.module)
        return call

    def described(self, graphs: int) -> str:
        """The target in a report, in which so many graphs were compiled of it."""
        return self.name

    @property
    def has_hooks(self) -> bool:
        """Whether hooks run in what is compiled."""
        return _torch.has_call_hooks(self.module, own=self.method is None)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered from shards for each call, and freed after it."""
        return is_sharded(self.module)

    def why_not_twice(self) -> str | None:
        """Why the target is not to be called more often than the user calls it: what it does beside computing."""
        if self.method not in (None, "forward"):
            return f"{self.method} may log and count, which a second call would do again"
        if self.has_hooks:
            return "it has hooks, which a second call would run again"
        return None


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """Blocks of one structure that are compiled with one function: what is compiled for one serves the others.

    Attributes:
        name: What reports call them, ``"encoder.layers.*"``.
        members: The blocks, each of them once.
        count: How many places they stand in.
    """

    name: str
    members: tuple[Target, ...]
    count: int

    def described(self, graphs: int) -> str:
        """The blocks in a report, in which so many graphs were compiled of them."""
        compiled = {0: "", 1: ", one graph"}.get(graphs, f", {graphs} graphs")
        return f"{self.name} ({self.count} blocks{compiled})"


Compiled: TypeAlias = Target | RepeatedBlocks
"""What is compiled with one function."""


Scope = Literal["whole", "repeated"]
"""How a model is compiled that is compiled all of it: as targets that were chosen, or as repeated blocks."""


def scope_of(names: Sequence[str] | None) -> Scope | None:
    """How targets that `check_names` gave compile a model; ``None`` where parts of it are named."""
    if names is None:
        return "whole"
    return "repeated" if names == REPEATED else None


@checks_settings
def check_names(targets: object) -> tuple[str, ...] | Repeated | None:
    """The ``targets`` argument as names.

    Returns:
        The names; ``None`` and ``"repeated"`` as they are.

    Raises:
        TypeError: Not a name or a list of names.
        ValueError: An empty list or name.
    """
    if targets is None or targets == REPEATED:
        return targets
    names = (targets,) if isinstance(targets, str) else targets
    if not isinstance(names, Sequence):
        raise TypeError(f"targets={targets!r} must be a list of names, {REPEATED!r}, or None to have them chosen")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"targets={targets!r} holds {name!r}, which is not a name but a {type(name).__name__}")
        if not name:
            raise ValueError(f"targets={targets!r} holds an empty name; the module's own call is 'forward'")
    if not names:
        raise ValueError("targets is empty; give names, or None to have them chosen")
    return tuple(names)


@checks_settings
def find_targets(root: nn.Module, names: Sequence[str] | None, base: type[nn.Module]) -> Sequence[Compiled]:
    """The targets that ``names`` mean in ``root``.

    Those with sharded weights that are alike share a graph: what sharing rules out, sharding does too.

    Args:
        root: The module to look in, a LightningModule for example.
        names: Dotted names of submodules or methods, or globs of submodule names; ``"forward"`` is the root's
            own call. ``None``: the root's ``forward`` if its class overrides that of ``base``, and each direct
            child that holds parameters (for a list or dict of modules, its members); what FSDP shards in parts means
            each of its parts that holds no other. ``"repeated"``: blocks that are repeated, see `find_repetitions`.
        base: The class whose ``forward`` does not count as one.

    Raises:
        ValueError: A name that matches nothing, or nothing is repeated.
    """
    if names == REPEATED:
        return _repeated(root)
    if names is None:
        found = list(_chosen(root, base))
    else:
        found = [target for name in names for target in _matching(root, name)]
    once: dict[tuple[int, str | None], Target] = {}
    for target in found:
        once.setdefault((id(target.module), target.method), target)
    alike: dict[Any, list[Target]] = {}
    for key, target in once.items():
        alike.setdefault(_look(target) if target.sharded else key, []).append(target)
    return [found[0] if len(found) == 1 else _blocks(root, found) for found in alike.values()]


def adopt_compiled(root: nn.Module) -> list[str]:
    """Undo what ``torch.compile`` did to a module by hand, and say where it had.

    The original takes the place of each submodule that ``torch.compile(module)`` wrapped; Lightning's own
    ``torch.compile(lightning_module)`` leaves compiled methods on the module, which go.
    """
    adopted = []
    if getattr(root, "_compiler_ctx", None) is not None:
        root._compiler_ctx = None  # type: ignore[assignment]
        for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
            vars(root).pop(name, None)
        adopted.append("the LightningModule")
    for prefix, parent in list(root.named_modules(remove_duplicate=False)):
        for name, child in list(parent._modules.items()):
            if child is not None and _torch.is_dynamo_wrapper(child):
                parent._modules[name] = _torch.unwrap_dynamo(child)
                adopted.append(f"{prefix}.{name}".removeprefix("."))
    return adopted


def repeated_blocks(root: nn.Module) -> list[RepeatedBlocks]:
    """The repeated blocks of a module; none where nothing in it is repeated. Where FSDP shards them, see `call_of`."""
    alike: dict[Any, list[Target]] = {}
    for blocks in find_repetitions(root):
        for path, block in blocks.items():
            for target in call_of(path, block):
                alike.setdefault(_look(target), []).append(target)
    return [_blocks(root, found) for found in alike.values()]


def _look(target: Target) -> Any:
    return target.method, structure_of(target.module)


def _blocks(root: nn.Module, targets: Sequence[Target]) -> RepeatedBlocks:
    once: dict[int, Target] = {}
    for target in targets:
        once.setdefault(id(target.module), target)
    return RepeatedBlocks(name_of(root, [target.name for target in targets]), tuple(once.values()), len(targets))


def _repeated(root: nn.Module) -> list[RepeatedBlocks]:
    if found := repeated_blocks(root):
        return found
    raise ValueError(
        f"targets={REPEATED!r} finds nothing to share a graph in {type(root).__name__}: no two blocks in its "
        "Sequentials and in its lists and dicts of modules have the same classes and shapes of weights. Give names of "
        f"its parts, or None to have it compiled as a whole (targets=[{REPEATED!r}] is the part of that name)"
    )


def call_of(name: str, module: nn.Module) -> list[Target]:
    """A module's call as targets: one, or where FSDP shards it in parts, each that holds no other.

    It is without what FSDP does around it: torch traces none of that, and ends the graph there.
    """
    name = without_wrappers(name)
    if not (units := innermost_units(module)):
        return [Target(name, module)]
    called = "" if name == "forward" else name.removesuffix(".forward")
    targets = []
    for path, unit in units:
        unit_name = ".".join(part for part in (called, path) if part) or name
        wrapped = wrapped_by_fsdp1(unit)
        targets.append(Target(unit_name, unit, "forward") if wrapped is None else Target(unit_name, wrapped))
    return targets


def _chosen(root: nn.Module, base: type[nn.Module]) -> Iterator[Target]:
    if type(root).forward is not base.forward:
        yield from call_of("forward", root)
    yield from _children(root, "")


def _children(parent: nn.Module, prefix: str) -> Iterator[Target]:
    for name, child in parent.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, _CONTAINERS):
            yield from _children(child, f"{prefix}{name}.")
        elif type(child).forward is not nn.Module.forward:
            yield from call_of(prefix + name, child)


def _matching(root: nn.Module, name: str) -> Iterator[Target]:
    if name == "forward":
        yield from call_of("forward", root)
        return
    modules = {path: module for path, module in root.named_modules(remove_duplicate=False) if path}
    if matches := [path for path in modules if fnmatch.fnmatchcase(path, name)]:
        yield from (target for path in matches for target in call_of(path, modules[path]))
        return
    owner_path, _, method = name.rpartition(".")
    owner = modules.get(owner_path) if owner_path else root
    if owner is not None and callable(getattr(type(owner), method, None)):
        sharded_call = method == "forward" and innermost_units(owner)
        yield from call_of(name, owner) if sharded_call else [Target(name, owner, method)]
        return
    raise ValueError(unknown("targets", name, ["forward", *modules]))
