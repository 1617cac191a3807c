"""Finds random generators and counts that change in a target's eager calls, but not in its compiled calls.

Dynamo executes some Python code only while it traces: ``random.sample`` and ``random.shuffle`` on torch 2.15, a class
attribute that counts on torch 2.11. The graph then contains one result for the rest of the run. A comparison of the
graph with its eager execution does not show this, because both contain the same result.
"""

from __future__ import annotations

import pickle
import random
import sys
import types
from typing import Any

from torch import nn

EAGER_CALLS = 2
"""The number of eager calls of a target in which `ChangingState` reads the state."""


class StateChanges:
    """Compares the Python state of a target before and after its calls."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._after: dict[str, Any] = {}
        self._module_id = 0

    def call_begins(self, module: nn.Module) -> None:
        """Read the state before a call."""
        self._before = python_state(module)

    def call_ended(self, module: nn.Module) -> dict[str, bool]:
        """Return whether the call changed the state, by name.

        A call that leaves the same state as the previous call has not changed the state. With ``random.sample``, torch
        2.15 sets the generator to the same state in each call, and other code may use the generator between the calls.
        """
        previous = self._after if self._module_id == id(module) else {}  # a repeated block has its own generators
        self._after, self._module_id = python_state(module), id(module)
        return {
            name: not any(name in earlier and value == earlier[name] for earlier in (self._before, previous))
            for name, value in self._after.items()
        }


class ChangingState:
    """The names of the generators and counts that change in each of the first eager calls of a target."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # empty before EAGER_CALLS calls, because a first call may draw once for all
        self._changed: list[set[str]] = []
        self._changes = StateChanges()

    def call_begins(self, module: nn.Module) -> None:
        """Read the state before an eager call, unless enough calls were observed."""
        if len(self._changed) < EAGER_CALLS:
            self._changes.call_begins(module)

    def call_ended(self, module: nn.Module) -> None:
        """Compare the state with the state before the call."""
        if len(self._changed) < EAGER_CALLS:
            self._changed.append({name for name, changes in self._changes.call_ended(module).items() if changes})
            if len(self._changed) == EAGER_CALLS:
                self.names |= set.intersection(*self._changed)

    @property
    def nothing_changes(self) -> bool:
        """Whether enough eager calls were observed, and none of the state changes in each of them."""
        return len(self._changed) == EAGER_CALLS and not self.names

    def unchanged_in(self, changes: dict[str, bool]) -> list[str]:
        """Return the names that have not changed in a compiled call."""
        return sorted(name for name in self.names if changes.get(name) is False)


class ChangingIntegers:
    """The integer attributes of a target's modules that change in the first eager calls, such as a count of the calls.

    torch compiles a graph for each value of such an attribute, unless ``allow_unspec_int_on_nn_module`` is set.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()  # empty before the second call of the module
        self._module_id: int | None = None  # of the first module, because repeated blocks have other integers
        self._seen: list[dict[str, int]] = []  # before each call

    def call_begins(self, module: nn.Module) -> None:
        """Read the integers before an eager call, unless enough calls were observed."""
        if len(self._seen) == EAGER_CALLS or self._module_id not in (None, id(module)):
            return
        self._module_id = id(module)
        self._seen.append(
            {
                f"{path}.{name}".lstrip("."): value
                for path, submodule in module.named_modules()
                for name, value in vars(submodule).items()
                if type(value) is int
            }
        )
        first, last = self._seen[0], self._seen[-1]
        self.names |= {name for name in first.keys() & last.keys() if first[name] != last[name]}


def python_state(module: nn.Module) -> dict[str, Any]:
    """Return the states of random generators, and the numbers in class attributes.

    The random generators are the global ones of Python and NumPy, and `random.Random` objects. The objects are looked
    up in the attributes of the module, its submodules and their classes, and in the global variables of the files that
    define these classes. NumPy's generator objects are not included: torch runs their methods outside of graphs, so
    each call draws new numbers.
    """
    state: dict[str, Any] = {"random": random.getstate()}
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        state["numpy.random"] = pickle.dumps(numpy_random.get_state(legacy=False))
    classes: set[type] = set()
    for path, submodule in module.named_modules():
        classes.update(type(submodule).__mro__)
        for name, value in list(vars(submodule).items()):
            if type(value) is random.Random:
                state[f"{path}.{name}".lstrip(".")] = value.getstate()
    classes -= {nn.Module, object}
    files = {sys.modules.get(cls.__module__) for cls in classes}
    for owner in (*classes, *files):
        if isinstance(owner, type | types.ModuleType):
            for name, value in list(vars(owner).items()):
                if type(value) is random.Random:
                    state[f"{owner.__name__}.{name}"] = value.getstate()
                elif isinstance(owner, type) and type(value) in (int, float):
                    state[f"{owner.__name__}.{name}"] = value
    return state
