"""`TargetSearch`: finds the modules and methods that the steps call, and keeps the targets up to date."""

from __future__ import annotations

import contextlib
import functools
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
from compile_callbacks.targets.resolve import group_targets, possible_callees, with_equal_blocks
from compile_callbacks.targets.target import Callee, Target, compilable_parts


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
        searched: Collection[Phase],  # the phases in which the search finds targets
        resolve: Callable[[], Sequence[Target]] | None,  # returns the named targets of a changed module
    ) -> None:
        self.called: list[CallProbe] = []
        """The targets that the running step has called for the first time in the phase."""
        self.records_methods = False
        """Whether a method may become a target: in the eager steps of a phase, before its first compiled one."""
        self._root, self._switch, self._warn, self.searched, self._resolve = root, switch, warn, searched, resolve
        self._tree = _tree(root)
        self.phase: Phase | None = None
        """The phase of the last step, or ``None`` before the first step of a run."""
        self._probes: dict[Phase | None, dict[CallProbe, None]] = {}
        self._in_method: list[CallProbe] | None = None  # the probes that a running method called

    @property
    def _standing(self) -> dict[CallProbe, None]:
        """The probes of the current phase."""
        return self._probes.get(self.phase, {})

    # ------------------------------------------------------------------------------------------ steps

    def step_begins(self, phase: Phase, *, first: bool, eager: bool) -> None:
        """Begin the ``first`` step of a stage or an epoch, which looks for changes of the module, or an early step."""
        with self._without_failures():
            if first and self._resolve is not None and _tree(self._root) != self._tree:
                self._look_up(self._resolve)
            if phase != self.phase:
                self._change_phase(phase)
        if not eager:
            self.records_methods = False
            self._drop([probe for probe in self._standing if probe.callee.method is not None])

    def step_ends(self) -> None:
        """End a step, and remove the probes beneath the targets that it called."""
        self._drop([below for probe in self.called for below in self._within(probe)])
        self.called.clear()

    def remove(self) -> None:
        """Remove all probes."""
        self.step_ends()
        self._drop(list(self._standing))
        self._probes.clear()
        self.phase, self._in_method = None, None

    def _change_phase(self, phase: Phase) -> None:
        for probe in self._standing:
            probe.remove()
        self.phase, self.records_methods = phase, True
        if phase in self.searched and phase not in self._probes:
            self._probes[phase] = dict.fromkeys(map(CallProbe, possible_callees(self._root)))
        for probe in self._standing:
            probe.selected = functools.partial(self._call, probe)
            probe.install()

    def _look_up(self, resolve: Callable[[], Sequence[Target]]) -> None:
        """Resolve the targets again, and discard those that are no longer a part of the module."""
        self.remove()
        named, before = {_identity(target): target for target in resolve()}, self._tree
        self._tree = _tree(self._root)
        gone = {number for _, number in set(before) - set(self._tree)}
        discarded = [
            target
            for target in self._switch.targets
            if any(id(member.module) in gone for member in target.members) or (named and _identity(target) not in named)
        ]
        self._switch.discard(discarded)
        known = {_identity(target) for target in self._switch.targets}
        self._switch.add([target for identity, target in named.items() if identity not in known])
        for target in () if self.searched else discarded:
            if target.name not in {target.name for target in named.values()}:
                message = f"target {target.name!r} is no longer a part of the module, so it is not compiled"
                self._warn.warn("CC102", message, about=(target.name, "gone"))

    # ------------------------------------------------------------------------------------------ one call

    def _call(self, probe: CallProbe, *args: Any, **kwargs: Any) -> Any:
        if probe not in self._standing or not probe.installed:  # the user's code has a reference to it
            return probe.below(*args, **kwargs)
        if self._in_method is not None:
            self._in_method.append(probe)
            return probe.below(*args, **kwargs)
        if self._new_parts([probe.callee]):
            in_step = self._switch.recorder.executions.step is not None  # calls of hooks between the steps do not count
            if not in_step or _torch.autograd.in_backward():
                return probe.below(*args, **kwargs)
            if probe.callee.method is not None:
                return self._call_method(probe, *args, **kwargs)
            self._add(probe)
        self.called.append(probe)
        with self._removed(self._within(probe)):
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
        callees = [standing.callee for standing in self._standing]
        with self._without_failures(), self._removed(self._standing):
            groups = [with_equal_blocks(probe.callee, callees)]
            if probe.callee.module is self._root:
                children = set(self._root.children())
                groups += [[callee] for callee in callees if callee.method is None and callee.module in children]
            for alike in groups:
                self._switch.add(group_targets(self._root, self._new_parts(alike)))

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

    def _new_parts(self, callees: Iterable[Callee]) -> list[Callee]:
        """Return the parts of called modules and methods that torch can compile and that are not targets yet."""
        known = {_key(member) for target in self._switch.targets for member in target.members}
        return [part for callee in callees for part in compilable_parts(callee) if _key(part) not in known]

    # ------------------------------------------------------------------------------------------ probes

    def _within(self, probe: CallProbe) -> list[CallProbe]:
        """Return the probes of a module and its methods, and beneath it."""
        inside = set(map(id, probe.callee.module.modules()))
        return [standing for standing in self._standing if id(standing.callee.module) in inside]

    def _drop(self, probes: Iterable[CallProbe]) -> None:
        for probe in probes:
            if probe in self._standing:
                del self._standing[probe]
                probe.remove()

    @contextlib.contextmanager
    def _removed(self, probes: Iterable[CallProbe]) -> Iterator[None]:
        removed = list(probes)
        for probe in removed:
            probe.remove()
        try:
            yield
        finally:
            for probe in removed:
                if probe in self._standing:
                    probe.install()


def _key(callee: Callee) -> tuple[int, str | None]:
    return id(callee.module), callee.method


def _identity(target: Target) -> Any:
    return target.name, tuple(map(_key, target.members))


def _tree(root: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]
