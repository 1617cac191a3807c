"""Torch 2.11 looks at weights only where a module was assigned to: here it is told of what changed in place."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain, compress
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from compile_callbacks import _torch

_REGISTRIES = ("_modules", "_parameters", "_buffers")
_REGISTRY_TYPES = (dict, OrderedDict)  # the second where something was taken out of an `nn.Sequential`


class _Look(NamedTuple):
    """What a module and those within it had registered when it was looked at.

    Tensors are not held: what is exchanged for another is to go. One that lies where another lay is in a registry that
    torch sees was changed. A module is held, as another one that lies there has registries of its own.

    Args:
        modules: The modules.
        holders: What holds each registry in which something was.
        names: The name of each registry in it.
        registries: These registries.
        ids: Of all that was in them, in order.
        compared: Which of these are tensors, each where it occurs first.
        tensors: The ids of these.
        are_same: Tells whether these tensors are as they were; ``None`` where that cannot be told.
    """

    modules: list[nn.Module]
    holders: list[dict[str, Any]]
    names: list[str]
    registries: list[dict[str, Any]]
    ids: list[int]
    compared: list[bool]
    tensors: frozenset[int]
    are_same: Callable[..., bool] | None


class GuardRefresher:
    """Has torch look at its guards on a module's weights where one of these changed in place.

    Torch 2.11 passes over the guards on what a module registers as long as nothing is put into the registry, unless it
    is told to look at all of them in each call. So it does not see ``requires_grad_()``, nor what ``.data`` changes, as
    ``module.double()`` does. Here all weights are compared before each call with what they were before the last one, in
    one go, by all that a guard on a tensor compares. Where one differs, the registries are made to look as if something
    had been put into them; what follows is decided by torch's guards.

    That holds for guards that are looked at in these calls alone: where several modules share graphs, one of them may
    have shown its guards a state of a part that the next one, which has it too, was not asked about.

    Args:
        module: The module whose parameters and buffers are compared, those of modules within it among them. One that is
            replaced is held until the next call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last: _Look | None = None
        self._given = False

    def refresh(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, guarded: bool) -> None:
        """Compare; a call is to follow. For the 320 tensors of a ResNet-50 this takes 70 µs.

        Args:
            args: What the call is given.
            kwargs: What it is given by name.
            guarded: Whether there are guards already; else there is nothing to tell torch.
        """
        same = self._last is not None and _is_as_it_was(self._last)
        if not same:
            self._last = self._look()
        assert self._last is not None
        # Where torch passes over a buffer, it does not see either that an input is that buffer, or is no more.
        inputs = map(id, chain(args, kwargs.values()))
        given_before, self._given = self._given, not self._last.tensors.isdisjoint(inputs)
        if guarded and (not same or self._given or given_before):
            for registry in self._last.registries:
                _torch.make_look_changed(registry)

    def takes_over(self) -> bool:
        """A graph was traced. Whether torch may pass over its guards on what the module registers.

        It may where all weights can be compared: they are plain tensors, and registered in the plain way, which those
        of parts that TorchScript compiled are not.
        """
        registries = [holder[name] for holder, name in self._find()]
        if self._last is not None and list(map(id, registries)) != list(map(id, self._last.registries)):
            self._last = None  # something was put where nothing was, and is looked at from the next call on
        holders = map(vars, self._module.modules())
        plain = all(type(holder.get(name)) in _REGISTRY_TYPES for holder in holders for name in _REGISTRIES)
        return plain and all(map(_is_plain, chain(self._module.parameters(), self._module.buffers())))

    def _look(self) -> _Look:
        found = self._find()
        holders, names = [holder for holder, _ in found], [name for _, name in found]
        registries = [holder[name] for holder, name in found]
        registered = list(_all_in(registries))
        first_at = {id(value): place for place, value in reversed(list(enumerate(registered)))}
        compared = [isinstance(v, torch.Tensor) and first_at[id(v)] == place for place, v in enumerate(registered)]
        tensors = list(compress(registered, compared))
        are_same = _torch.tensor_comparison(tensors) if all(map(_is_plain, tensors)) else None
        modules, ids, of_tensors = list(self._module.modules()), list(map(id, registered)), frozenset(map(id, tensors))
        return _Look(modules, holders, names, registries, ids, compared, of_tensors, are_same)

    def _find(self) -> list[tuple[dict[str, Any], str]]:
        """Where something is registered: what holds the registry, and by what name."""
        found = [(vars(part), name) for part in self._module.modules() for name in _REGISTRIES]
        return [(holder, name) for holder, name in found if type(holder.get(name)) in _REGISTRY_TYPES and holder[name]]


def _is_as_it_was(last: _Look) -> bool:
    if last.are_same is None or not all(map(is_, map(dict.get, last.holders, last.names), last.registries)):
        return False
    registered = list(_all_in(last.registries))
    return list(map(id, registered)) == last.ids and last.are_same(*compress(registered, last.compared))


def _all_in(registries: list[dict[str, Any]]) -> chain[Any]:
    return chain.from_iterable(map(dict.values, registries))


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
