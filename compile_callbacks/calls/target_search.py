"""`TargetSearch`: finds the modules and methods that the steps call, and keeps the targets up to date."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from compile_callbacks import _torch
from compile_callbacks._utils.errors import WarnOnce
from compile_callbacks._utils.messages import describe_failure, in_one_line
from compile_callbacks._utils.phases import Phase
from compile_callbacks.calls.dispatcher import Recorder
from compile_callbacks.calls.phase_switch import PhaseSwitch
from compile_callbacks.targets.called import compilable_parts, possible_callees, with_equal_blocks
from compile_callbacks.targets.target import Callee, Target


class TargetSearch:
    """Makes what the steps call outermost targets, and looks the targets up again when the module has changed.

    A `Recorder` stands above the slot of each possible target, in the phases that this library compiles. When a step
    calls a module, the module becomes a target, and the call runs as the current step does: compiled or eager. A method
    becomes a target after its first eager call, if it called a module or returned a tensor. If it called its own
    module, as ``generate`` does, the modules that it calls become targets instead.

    While a target runs, no recorder stands beneath it, so that Dynamo traces none and eager calls take no longer. After
    the step in which the target was first called, these recorders are removed from the phase for good.
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
        self.called: list[Recorder] = []
        """The targets that the running step has called for the first time in the phase."""
        self._root, self._switch, self._warn = root, switch, warn
        self._group, self._resolve, self._uncompiled = group, resolve, uncompiled
        self._resolved = list(switch.targets)  # the other targets were called
        self._tree = _tree(root)
        self._eager = self._records_methods = False
        self._phase: Phase | None = None
        self._recorders: dict[Phase, dict[Recorder, None]] = {}
        self._standing: dict[Recorder, None] = {}  # the recorders of the current phase
        self._in_method: list[Recorder] | None = None  # the recorders that a running method called

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
            self._drop([recorder for recorder in self._standing if recorder.callee.method is not None])
        self.in_step, self._eager = True, eager

    def step_ends(self) -> None:
        """End a step, and remove the recorders beneath the targets that it called."""
        self.in_step = False
        if self.called:
            within = [part for recorder in self.called for part in self._within(recorder)]
            self.called.clear()
            self._drop(within)

    def remove(self) -> None:
        """Remove all recorders."""
        self.step_ends()
        self._drop(list(self._standing))
        self._recorders.clear()
        self._phase, self._in_method = None, None

    def _change_phase(self, phase: Phase) -> None:
        for recorder in self._standing:
            recorder.remove()
        self._standing, self._phase = {}, phase
        if self._group is None or phase in self._uncompiled:
            return
        if phase not in self._recorders:
            self._recorders[phase] = {Recorder(one, self._call): None for one in possible_callees(self._root)}
        self._standing, self._records_methods = self._recorders[phase], True
        for recorder in self._standing:
            recorder.install()

    # ------------------------------------------------------------------------------------------ one call

    def _call(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        if recorder not in self._standing or not recorder.installed:  # the user's code has a reference to it
            return recorder.below(*args, **kwargs)
        if self._in_method is not None:
            self._in_method.append(recorder)
            return recorder.below(*args, **kwargs)
        if recorder.covered is None:
            known = {_key(member) for target in self._switch.targets for member in target.members}
            new = [one for one in compilable_parts(recorder.callee) if _key(one) not in known]
            recorder.covered = not new or recorder.callee.module is self._root
        if not recorder.covered and self.in_step and not _torch.autograd.in_backward():
            if recorder.callee.method is None:
                self._add(recorder)
            elif self._eager:
                return self._call_method(recorder, *args, **kwargs)
        if not recorder.covered:
            return recorder.below(*args, **kwargs)
        if recorder not in self.called:
            self.called.append(recorder)
        with _removed(self._within(recorder), self._standing):
            return recorder.below(*args, **kwargs)

    def _call_method(self, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
        called = self._in_method = []
        try:
            result = recorder.below(*args, **kwargs)
        finally:
            self._in_method = None
        if any(one.callee.module is recorder.callee.module and _is_call(one) for one in called):
            self._drop([recorder])
        elif called or any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            self._add(recorder)
            self.called.append(recorder)
        return result

    def _add(self, recorder: Recorder) -> None:
        """Make a called module or method a target, with the equal blocks next to it."""
        assert self._group is not None
        recorder.covered = True
        others = [one.callee for one in self._standing]
        known = {_key(member) for target in self._switch.targets for member in target.members}
        with self._without_failures(), _removed(list(self._standing), self._standing):
            blocks = with_equal_blocks(self._root, recorder.callee, others)
            equal = [one for block in blocks for one in compilable_parts(block)]
            self._switch.add(self._group(self._root, [one for one in equal if _key(one) not in known]))
        for one in self._standing:
            one.covered = one.covered or None

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

    def _within(self, recorder: Recorder) -> list[Recorder]:
        """Return the recorders of a module and its methods, and beneath it."""
        inside = {id(module) for module in recorder.callee.module.modules()}
        return [one for one in self._standing if id(one.callee.module) in inside]

    def _drop(self, recorders: Iterable[Recorder]) -> None:
        for recorder in recorders:
            if recorder in self._standing:
                del self._standing[recorder]
                recorder.remove()

    # ------------------------------------------------------------------------------------------ a changed module

    def _look_up(self, resolve: Callable[[], Sequence[Target]]) -> None:
        """Resolve the targets again, and discard those that are no longer a part of the module."""
        self.remove()
        resolved = resolve()
        self._tree = _tree(self._root)
        parts = {number for _, number in self._tree}
        identities = {_identity(target) for target in resolved}
        keys = {_key(member) for target in resolved for member in target.members}
        kept: list[Target] = []
        gone: list[Target] = []
        for target in self._switch.targets:
            was_called = target not in self._resolved and keys.isdisjoint(map(_key, target.members))
            is_part = was_called and parts.issuperset(_modules_of(target))
            (kept if is_part or _identity(target) in identities else gone).append(target)
        self._switch.discard(gone)
        known = {_identity(target) for target in kept}
        self._switch.add([target for target in resolved if _identity(target) not in known])
        self._resolved = [target for target in self._switch.targets if _identity(target) in identities]
        if self._group is None:
            for name in {target.name for target in gone} - {target.name for target in resolved}:
                self._warn.warn(
                    "CC102",
                    f"target {name!r} is no longer a part of the module, so it is not compiled",
                    about=(name, "gone"),
                )


@contextlib.contextmanager
def _removed(recorders: Sequence[Recorder], standing: Collection[Recorder]) -> Iterator[None]:
    """Remove recorders within the ``with`` block."""
    for recorder in recorders:
        recorder.remove()
    try:
        yield
    finally:
        for recorder in recorders:
            if recorder in standing:
                recorder.install()


def _is_call(recorder: Recorder) -> bool:
    return recorder.callee.method in (None, "forward")


def _key(callee: Callee) -> tuple[int, str | None]:
    return id(callee.module), callee.method


def _identity(target: Target) -> Any:
    return target.name, tuple(map(_key, target.members)), _modules_of(target)


def _modules_of(target: Target) -> tuple[int, ...]:
    """Return the ids of the modules of the members and of the regions."""
    return tuple(map(id, itertools.chain((member.module for member in target.members), *target.regions)))


def _tree(root: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(module)) for name, module in root.named_modules(remove_duplicate=False)]
