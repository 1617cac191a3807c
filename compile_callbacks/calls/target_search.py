"""`TargetSearch`: finds the modules and methods that the steps call, and keeps the targets up to date."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.dispatcher import CallProbe
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.targets.called import compilable_parts, possible_callees, with_equal_blocks
from compile_callbacks.targets.target import Callee, Target


class TargetSearch:
    """Turns modules and methods that the steps call outermost into targets, and updates targets of a changed module.

    A `CallProbe` stands above the slot of each possible target, in the phases that this library compiles. When a step
    calls a module, the module becomes a target, and the call runs as the current step does: compiled or eager. A method
    becomes a target after its first eager call, if it called a module or returned a tensor. If it called its own
    module, as ``generate`` does, the modules that it calls become targets instead.

    While a target runs, no probe stands beneath it, so that Dynamo traces none and eager calls take no longer. After
    the step in which the target was first called, these probes are removed from the phase for good.
    """

    def __init__(
        self,
        root: nn.Module,
        switch: PhaseSwitch,
        warn: WarnOnce,
        *,
        group: Callable[[nn.Module, list[Callee]], list[Target]] | None = None,
        resolve: Callable[[], Sequence[Target]] | None = None,
        uncompiled: Collection[Phase] = (),
    ) -> None:
        self.in_step = False
        """Whether a step is running. Calls of hooks between the steps are not recorded."""
        self.called: list[CallProbe] = []
        """The targets that the running step has called for the first time in the phase."""
        self._root, self._switch, self._warn = root, switch, warn
        self._group, self._resolve, self._uncompiled = group, resolve, uncompiled
        self._tree = _tree(root)
        self._eager = self._records_methods = False
        self._phase: Phase | None = None
        self._probes: dict[Phase, dict[CallProbe, None]] = {}
        self._standing: dict[CallProbe, None] = {}  # the probes of the current phase
        self._in_method: list[CallProbe] | None = None  # the probes that a running method called

    # ------------------------------------------------------------------------------------------ steps

    def step_begins(self, phase: Phase, *, first: bool, eager: bool) -> None:
        """Begin a step. At the ``first`` step of a stage or an epoch, look for changes of the module."""
        if first or phase != self._phase:
            with self._without_failures():
                if first and self._resolve is not None and _tree(self._root) != self._tree:
                    self._look_up(self._resolve)
                if phase != self._phase:
                    self._change_phase(phase)
        if not eager and self._records_methods:  # a method becomes a target in an eager step only
            self._records_methods = False
            self._drop([probe for probe in self._standing if probe.callee.method is not None])
        self.in_step, self._eager = True, eager

    def step_ends(self) -> None:
        """End a step, and remove the probes beneath the targets that it called."""
        self.in_step = False
        if self.called:
            within = [below for probe in self.called for below in self._within(probe)]
            self.called.clear()
            self._drop(within)

    def remove(self) -> None:
        """Remove all probes."""
        self.step_ends()
        self._drop(list(self._standing))
        self._probes.clear()
        self._phase, self._in_method = None, None

    def _change_phase(self, phase: Phase) -> None:
        for probe in self._standing:
            probe.remove()
        self._standing, self._phase = {}, phase
        if self._group is None or phase in self._uncompiled:
            return
        if phase not in self._probes:
            self._probes[phase] = {CallProbe(callee, self._call): None for callee in possible_callees(self._root)}
        self._standing, self._records_methods = self._probes[phase], True
        for probe in self._standing:
            probe.install()

    # ------------------------------------------------------------------------------------------ one call

    def _call(self, probe: CallProbe, *args: Any, **kwargs: Any) -> Any:
        if probe not in self._standing or not probe.installed:  # the user's code has a reference to it
            return probe.below(*args, **kwargs)
        if self._in_method is not None:
            self._in_method.append(probe)
            return probe.below(*args, **kwargs)
        if probe.covered is None:
            probe.covered = not self._new_parts([probe.callee])
        if not probe.covered and self.in_step and not _torch.autograd.in_backward():
            if probe.callee.method is None:
                self._add(probe)
            elif self._eager:
                return self._call_method(probe, *args, **kwargs)
        if not probe.covered:
            return probe.below(*args, **kwargs)
        if probe not in self.called:
            self.called.append(probe)
        with _removed(self._within(probe), self._standing):
            return probe.below(*args, **kwargs)

    def _call_method(self, probe: CallProbe, *args: Any, **kwargs: Any) -> Any:
        called = self._in_method = []
        try:
            result = probe.below(*args, **kwargs)
        finally:
            self._in_method = None
        module = probe.callee.module
        if any(inner.callee.module is module and inner.callee.method in (None, "forward") for inner in called):
            self._drop([probe])
        elif called or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self._add(probe)
            self.called.append(probe)
        return result

    def _add(self, probe: CallProbe) -> None:
        """Make a called module or method a target, with the equal blocks next to it.

        The call of the root hides its children, which later steps may call, so they become targets, too.
        """
        assert self._group is not None
        probe.covered = True
        callees = [standing.callee for standing in self._standing]
        with self._without_failures(), _removed(list(self._standing), self._standing):
            groups = [with_equal_blocks(self._root, probe.callee, callees)]
            if probe.callee.module is self._root:
                children = set(self._root.children())
                groups += [[callee] for callee in callees if callee.method is None and callee.module in children]
            for alike in groups:
                self._switch.add(self._group(self._root, self._new_parts(alike)))
        for standing in self._standing:
            standing.covered = standing.covered or None

    def _new_parts(self, callees: Iterable[Callee]) -> list[Callee]:
        """Return what torch can compile of called modules and methods, without what is a target already."""
        known = {_key(member) for target in self._switch.targets for member in target.members}
        return [part for callee in callees for part in compilable_parts(callee) if _key(part) not in known]

    @contextlib.contextmanager
    def _without_failures(self) -> Iterator[None]:
        """Warn about an exception in the search. It costs a target, and never the run."""
        try:
            yield
        except Exception as error:
            if isinstance(error, Warning):  # the user's warning filters turn warnings into errors
                raise
            reason = in_one_line(describe_failure(error))
            self._warn.warn("CC102", f"a module that the steps call could not be made a target: {reason}", about=reason)

    def _within(self, probe: CallProbe) -> list[CallProbe]:
        """Return the probes of a module and its methods, and beneath it."""
        inside = {id(module) for module in probe.callee.module.modules()}
        return [standing for standing in self._standing if id(standing.callee.module) in inside]

    def _drop(self, probes: Iterable[CallProbe]) -> None:
        for probe in probes:
            if probe in self._standing:
                del self._standing[probe]
                probe.remove()

    # ------------------------------------------------------------------------------------------ a changed module

    def _look_up(self, resolve: Callable[[], Sequence[Target]]) -> None:
        """Resolve the targets again, and discard those that are no longer a part of the module."""
        self.remove()
        resolved, before = resolve(), self._tree
        self._tree = _tree(self._root)
        if self._group is not None:
            gone = {number for _, number in set(before) - set(self._tree)}
            of_gone = [t for t in self._switch.targets if any(id(member.module) in gone for member in t.members)]
            self._switch.discard(of_gone)
            return
        named = {_identity(target): target for target in resolved}
        discarded = [target for target in self._switch.targets if _identity(target) not in named]
        self._switch.discard(discarded)
        known = {_identity(target) for target in self._switch.targets}
        self._switch.add([target for identity, target in named.items() if identity not in known])
        for name in {target.name for target in discarded} - {target.name for target in resolved}:
            message = f"target {name!r} is no longer a part of the module, so it is not compiled"
            self._warn.warn("CC102", message, about=(name, "gone"))


@contextlib.contextmanager
def _removed(probes: Sequence[CallProbe], standing: Collection[CallProbe]) -> Iterator[None]:
    for probe in probes:
        probe.remove()
    try:
        yield
    finally:
        for probe in probes:
            if probe in standing:
                probe.install()


def _key(callee: Callee) -> tuple[int, str | None]:
    return id(callee.module), callee.method


def _identity(target: Target) -> Any:
    return target.name, tuple(map(_key, target.members))


def _tree(root: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]
