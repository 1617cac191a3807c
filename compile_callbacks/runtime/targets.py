"""Which parts of a module are compiled: named by the user, or chosen."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from compile_callbacks import _torch
from compile_callbacks._utils.messages import unknown
from compile_callbacks._utils.phases import PHASES, Phase
from compile_callbacks.runtime.fsdp import innermost_fsdp_units
from compile_callbacks.runtime.repeated import (
    REPEATED,
    Compiled,
    Repeated,
    blocks_or_error,
    group_targets,
    repeated_blocks,
)
from compile_callbacks.runtime.target import Target, call_targets, only_if_named, overlap

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward: what is called is what they hold


def check_target_names(targets: object) -> tuple[str, ...] | Repeated | None:
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


def resolve_targets(
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
        return blocks_or_error(root)
    if names is None:
        found = [target for target in _chosen(root, base) if not any(overlap(target, other) for other in others)]
    else:
        found = [target for name in names for target in _matching(root, name)]
    return group_targets(root, found, lambda target: target.sharded)


def named_targets(root: nn.Module, names: Sequence[str] | None) -> list[Target]:
    """The targets that ``names`` mean in ``root``, see `resolve_targets`; ``None`` names nothing.

    Raises:
        ValueError: A name that matches nothing.
    """
    if names == REPEATED:
        return [member for blocks in repeated_blocks(root) for member in blocks.members]
    return [target for name in names or () for target in _matching(root, name)]


def unwrap_compiled(root: nn.Module, left_alone: frozenset[Phase] = frozenset()) -> list[str]:
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


def _chosen(root: nn.Module, base: type[nn.Module]) -> Iterator[Target]:
    if type(root).forward is not base.forward:
        yield from call_targets("forward", root)
    yield from _children(root, "")


def _children(parent: nn.Module, prefix: str) -> Iterator[Target]:
    for name, child in parent.named_children():
        if next(child.parameters(), None) is None:
            continue
        if isinstance(child, _CONTAINERS):
            yield from _children(child, f"{prefix}{name}.")
        elif not only_if_named(child) and type(child).forward is not nn.Module.forward:
            yield from call_targets(prefix + name, child)


def _matching(root: nn.Module, name: str) -> Iterator[Target]:
    if name == "forward":
        yield from call_targets("forward", root)
        return
    modules = {path: module for path, module in root.named_modules(remove_duplicate=False) if path}
    if matches := [path for path in modules if fnmatch.fnmatchcase(path, name)]:
        yield from (target for path in matches for target in call_targets(path, modules[path]))
        return
    owner_path, _, method = name.rpartition(".")
    owner = modules.get(owner_path) if owner_path else root
    if owner is not None and _has_method(owner, method):
        sharded_call = method == "forward" and innermost_fsdp_units(owner)
        yield from call_targets(name, owner) if sharded_call else [Target(name, owner, method)]
        return
    raise ValueError(unknown("targets", name, ["forward", *modules]))


def _has_method(module: nn.Module, name: str) -> bool:
    """Whether a module has a method, without asking its properties."""
    if isinstance(module, torch.jit.ScriptModule):
        return hasattr(module, name)
    return callable(vars(module).get(name, getattr(type(module), name, None)))
