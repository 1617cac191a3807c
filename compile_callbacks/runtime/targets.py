"""Which parts of a module are compiled: named by the user, or chosen."""

from __future__ import annotations

import fnmatch
import inspect
import itertools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.errors import CompileWarning
from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.runtime.fsdp import innermost_units, is_sharded, without_wrappers, wrapped_by_fsdp1
from compile_callbacks.runtime.repeated import find_repetitions, name_of, structure_of

Repeated = Literal["repeated"]
REPEATED: Repeated = "repeated"
"""As the ``targets`` argument: repeated blocks, which share one graph. In a list it is a name like others."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: what is called is what they hold


class InstalledCall:
    """What takes the place of a target's call while it is compiled.

    Attributes:
        target: The target.
    """

    target: Target


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

    def __post_init__(self) -> None:
        # An attribute of the module itself wins over its class: net.forward = patched.
        own = vars(self.module).get(self.method) if self.method else None
        object.__setattr__(self, "_own", own.target.own_function if isinstance(own, InstalledCall) else own)

    @property
    def members(self) -> tuple[Target, ...]:
        """What is compiled with one function: this target alone."""
        return (self,)

    @property
    def own_function(self) -> Callable[..., Any] | None:
        """The function that the module itself has in place of its class's method, if it has one."""
        own: Callable[..., Any] | None = vars(self)["_own"]
        return own

    @property
    def function(self) -> Callable[..., Any]:
        """What the target does uncompiled, hooks included, as a function of the module."""
        if (own := self.own_function) is None:
            function: Callable[..., Any] = getattr(type(self.module), self.method or "_call_impl")
            return function
        if isinstance(own, types.MethodType) and own.__self__ is self.module:
            return own.__func__

        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        return call

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
        return _torch.dynamo.has_call_hooks(self.module, own=self.method is None)

    @property
    def sharded(self) -> bool:
        """Whether weights are gathered from shards for each call, and freed after it."""
        return is_sharded(self.module)

    def why_not_compiled(self) -> str | None:
        """Why the target runs as it is, whatever the settings; ``None`` if it can be compiled."""
        if isinstance(self.module, torch.jit.ScriptModule):
            return "it is a TorchScript module, which torch.compile cannot trace"
        method = self.method or "forward"
        function = vars(self.module).get(method, getattr(type(self.module), method, None))
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return f"its {method} is an async function, and a compiled one would not return a coroutine"
        return None


@dataclass(frozen=True, eq=False)
class RepeatedBlocks:
    """Blocks of one structure that are compiled with one function: what is compiled for one serves the others.

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

    def described(self, graphs: int) -> str:
        """The blocks in a report, in which so many graphs were compiled of them."""
        compiled = {0: "", 1: ", one graph"}.get(graphs, f", {graphs} graphs")
        return f"{self.name} ({self.count} blocks{compiled})"


Compiled: TypeAlias = Target | RepeatedBlocks
"""What is compiled with one function."""


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


def find_targets(
    root: nn.Module, names: Sequence[str] | None, base: type[nn.Module], others: Sequence[Target] = ()
) -> Sequence[Compiled]:
    """The targets that ``names`` mean in ``root``.

    Those with sharded weights that are alike share a graph: what sharing rules out, sharding does too.

    Args:
        root: The module to look in, a LightningModule for example.
        names: Dotted names of submodules or methods, or globs of submodule names; ``"forward"`` is the root's
            own call. ``None``: the root's ``forward`` if its class overrides that of ``base``, and each direct
            child that holds parameters (for a list or dict of modules, its members), except metrics and TorchScript;
            what FSDP shards in parts means each of its parts that holds no other. ``"repeated"``: blocks that are
            repeated, see `find_repetitions`.
        base: The class whose ``forward`` does not count as one.
        others: Targets of other callbacks. ``None`` leaves out what overlaps with them.

    Raises:
        ValueError: A name that matches nothing, or nothing is repeated.
    """
    if names == REPEATED:
        return _repeated(root)
    if names is None:
        found = [target for target in _chosen(root, base) if not any(overlap(target, other) for other in others)]
    else:
        found = [target for name in names for target in _matching(root, name)]
    return group_targets(root, found, lambda target: target.sharded)


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
        if (reason := target.why_not_compiled()) is not None:
            del once[key]
            _warn(f"target {target.name!r} is not compiled: {reason}")
    alike: dict[Any, list[Target]] = {}
    for key, target in once.items():
        alike.setdefault(_look(target) if shares(target) else key, []).append(target)
    return [found[0] if len(found) == 1 else _blocks(root, found) for found in alike.values()]


def is_opaque(module: nn.Module) -> bool:
    """Whether a module is a target only if it is named: a metric (it is state, not computation), or TorchScript."""
    classes = type(module).__mro__
    is_metric = any(cls.__name__ == "Metric" and cls.__module__.startswith("torchmetrics.") for cls in classes)
    return is_metric or isinstance(module, torch.jit.ScriptModule)


def named_targets(root: nn.Module, names: Sequence[str] | None) -> list[Target]:
    """The targets that ``names`` mean in ``root``, see `find_targets`; ``None`` names nothing.

    Raises:
        ValueError: A name that matches nothing.
    """
    if names == REPEATED:
        return [member for blocks in repeated_blocks(root) for member in blocks.members]
    return [target for name in names or () for target in _matching(root, name)]


def overlap(one: Target, other: Target) -> bool:
    """Whether two targets are the same call, or the module of one contains the module of the other."""
    if one.module is other.module:
        return (one.method or "forward") == (other.method or "forward")
    return contains(one.module, other.module) or contains(other.module, one.module)


def contains(outer: nn.Module, inner: nn.Module) -> bool:
    """Whether a module is another one, or a part of it."""
    return any(part is inner for part in outer.modules())


def adopt_compiled(root: nn.Module, left_alone: frozenset[Phase] = frozenset()) -> list[str]:
    """Take the wrappers that ``torch.compile`` returned out of a module, and return where they were.

    The original takes the place of each submodule that ``torch.compile(module)`` wrapped, and is compiled in place as
    the wrapper was. Lightning's own ``torch.compile(lightning_module)`` leaves compiled methods on the module; they
    stay in a phase that is left alone.

    Args:
        root: The module.
        left_alone: The phases that run as the user compiled them. If these are both phases, nothing changes.
    """
    if left_alone == frozenset(PHASES):
        return []
    adopted = []
    if getattr(root, "_compiler_ctx", None) is not None:
        replaced = [_STEPS[phase] for phase in PHASES if phase not in left_alone]
        if methods := [name for name in ("forward", *itertools.chain(*replaced)) if name in vars(root)]:
            for name in methods:
                del vars(root)[name]
            adopted.append("the LightningModule")
        if not left_alone:
            root._compiler_ctx = None  # type: ignore[assignment]
    for prefix, parent in list(root.named_modules(remove_duplicate=False)):
        for name, child in list(parent._modules.items()):
            if child is not None and _torch.dynamo.is_dynamo_wrapper(child):
                parent._modules[name] = _torch.dynamo.compiled_in_place(child)
                adopted.append(f"{prefix}.{name}".removeprefix("."))
    return adopted


_STEPS: dict[Phase, tuple[str, ...]] = {
    "train": ("training_step",),
    "infer": ("validation_step", "test_step", "predict_step"),
}


def repeated_blocks(root: nn.Module) -> list[RepeatedBlocks]:
    """The repeated blocks of a module; none where nothing in it is repeated. Where FSDP shards them, see `call_of`."""
    alike: dict[Any, list[Target]] = {}
    for blocks in find_repetitions(root):
        for path, block in blocks.items():
            for target in call_of(path, block):
                if target.why_not_compiled() is None:
                    alike.setdefault(_look(target), []).append(target)
    return [_blocks(root, found) for found in alike.values()]


def _look(target: Target) -> Any:
    return target.method, target.own_function, structure_of(target.module)


def _warn(message: str) -> None:
    """Warn, in one of several processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        warnings.warn(message, CompileWarning, stacklevel=3)


def _blocks(root: nn.Module, targets: Sequence[Target]) -> RepeatedBlocks:
    once: dict[int, Target] = {}
    for target in targets:
        once.setdefault(id(target.module), target)
    return RepeatedBlocks(name_of(root, [target.name for target in targets]), tuple(once.values()), len(targets))


def _repeated(root: nn.Module) -> list[RepeatedBlocks]:
    if found := repeated_blocks(root):
        return [replace(blocks, asked_for=True) for blocks in found]
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
        elif not is_opaque(child) and type(child).forward is not nn.Module.forward:
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
    if owner is not None and _has_method(owner, method):
        sharded_call = method == "forward" and innermost_units(owner)
        yield from call_of(name, owner) if sharded_call else [Target(name, owner, method)]
        return
    raise ValueError(unknown("targets", name, ["forward", *modules]))


def _has_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method, without asking its properties."""
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, name)
    return callable(vars(module).get(name, getattr(type(module), name, None)))
