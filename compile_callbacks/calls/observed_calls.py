"""`ObservedCalls`: facts about a target's calls, which decide how its graphs are compiled."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from compile_callbacks import _torch
from compile_callbacks._utils.phases import Phase
from compile_callbacks._utils.signatures import tensors_of

SPECIALIZED = (0, 1)
"""Sizes for which torch compiles a separate graph, even if the dimension is dynamic."""

DIFFERENTIATED = "gradients are differentiated"  # a backward pass through an eager call had create_graph=True
KEPT = "graphs are kept"  # a backward pass through an eager call had retain_graph=True

MAX_SETS = 1000
"""The maximum number of sets of sizes to keep."""

_running = threading.local()  # its calls are the records of the eager calls that run in the thread

_Sizes = tuple[tuple[str, tuple[int, ...]], ...]
"""The set of sizes of a call: of each tensor, its name with its number of dimensions, and its shape."""


class ObservedCalls:
    """Records facts about a target's calls in one phase.

    In the eager steps, a dimension varies if it has three sizes, or two sizes that each come in a quarter of the calls.
    The smaller last batch of an epoch does not make the batch size dynamic. Of later calls, those count that compile or
    that the code does not fit. If such calls have two sets of sizes, each set gets a static graph, because a dynamic
    graph is slower and would also serve the usual calls. With more sets, each dimension that has two sizes varies. The
    sizes 0 and 1 do not count.
    """

    def __init__(self) -> None:
        self.facts: set[str] = set()  # those of DIFFERENTIATED and KEPT that are true
        self.eager: Counter[_Sizes] = Counter()  # the number of eager calls, by set of sizes
        self._later: Counter[_Sizes] = Counter()  # the same of calls that compile, or that the code does not fit
        self._known: set[tuple[str, int]] = set()  # the inputs and dimensions that varied in earlier runs

    def recording(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a target's eager call to observe its inputs and the backward pass."""

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.record(args, kwargs, eager=True)  # takes about 1 µs per input
            outer = getattr(_running, "calls", ())
            _running.calls = (*outer, self)
            try:
                result = call(*args, **kwargs)
            finally:
                _running.calls = outer
            if _torch.dynamo.is_transformed():
                return result  # torch.func.grad enables grad mode in its backward pass, but needs no second one
            for _, output in tensors_of((result,), {}):
                if output.grad_fn is not None:
                    output.grad_fn.register_prehook(self._backward_begins)
            return result

        return recorded

    def _backward_begins(self, gradients: Any) -> None:
        # Autograd enables grad mode in a backward pass only with create_graph=True.
        facts = [DIFFERENTIATED] * torch.is_grad_enabled() + [KEPT] * _torch.autograd.graph_is_kept()
        for observed in (self, *getattr(_running, "calls", ())):  # a running target differentiates the gradients itself
            observed.facts.update(facts)

    def record(self, args: Any, kwargs: Any, *, eager: bool = False) -> None:
        """Record an ``eager`` call, or a later one that compiles, or that the compiled code does not fit."""
        sets, sizes = self.eager if eager else self._later, _sizes_of(args, kwargs)
        if eager and not sets:
            self.facts.clear()  # of an earlier run, whose backward passes may have been others
        if len(sets) < MAX_SETS or sizes in sets:
            sets[sizes] += 1

    @property
    def later_sets(self) -> int:
        """The number of sets of sizes of the calls that compiled, or that the code did not fit."""
        return len(self._later)

    def is_second_set(self, args: Any, kwargs: Any) -> bool:
        """Return whether a call has the second set of sizes, for which a static graph is compiled."""
        return len(self._later) == 2 and list(self._later)[1] == _sizes_of(args, kwargs)

    def varying(self) -> dict[str, list[int]]:
        """Return the dimensions that vary, by input."""
        places = self._known | {place for place, counts in _by_place(self.eager) if _varies(counts)}
        if len(self._later) > 2:
            places |= {place for place, counts in _by_place(self._later) if len(counts.keys() - SPECIALIZED) > 1}
        return {key: sorted(i for name, i in places if name == key) for key, _ in sorted(places)}

    def mark(self, args: Any, kwargs: Any, undo: contextlib.ExitStack) -> None:
        """Mark the inputs that vary as dynamic for a compile."""
        varying = self.varying()
        for name, value in tensors_of(args, kwargs) if varying else ():
            if dimensions := [i for i in varying.get(f"{name}:{value.dim()}", ()) if i < value.dim()]:
                undo.callback(_torch.dynamo.mark_dimensions(value, dimensions))

    def state(self) -> dict[str, Any]:
        """Return the observations as JSON-ready data."""
        return {**self.varying(), **dict.fromkeys(sorted(self.facts), True)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an earlier run. Ignore data of another form."""
        self.facts |= {DIFFERENTIATED, KEPT} & state.keys()
        for key, dimensions in state.items():
            if isinstance(dimensions, list):
                self._known.update((key, i) for i in dimensions if type(i) is int and i >= 0)


class CallRecords(dict[tuple[str, Phase], ObservedCalls]):
    """The `ObservedCalls` of each target and phase of a session."""

    def of(self, target: str, phase: Phase) -> ObservedCalls:
        """Return the record of a target in a phase."""
        return self.setdefault((target, phase), ObservedCalls())

    def shares(self, phase: Phase) -> dict[str, float]:
        """Return the share of the most frequent set of sizes in the eager calls of each target of a phase."""
        eager = {target: observed.eager for (target, of_phase), observed in self.items() if of_phase == phase}
        return {target: max(sets.values()) / sets.total() for target, sets in eager.items() if sets}

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the observations by phase and target, as JSON-ready data."""
        states: dict[str, dict[str, Any]] = {}
        for (target, phase), observed in self.items():
            if state := observed.state():
                states.setdefault(phase, {})[target] = state
        return states

    def restore(self, states: Mapping[Any, Mapping[str, Any]]) -> None:
        """Continue from the `state` of an earlier run."""
        for phase, of_phase in states.items():
            for target, state in of_phase.items():
                if isinstance(state, Mapping):
                    self.of(target, phase).restore(state)


def _sizes_of(args: Any, kwargs: Any) -> _Sizes:
    return tuple((f"{name}:{value.dim()}", tuple(value.shape)) for name, value in tensors_of(args, kwargs))


def _by_place(sets: Counter[_Sizes]) -> Iterable[tuple[tuple[str, int], Counter[int]]]:
    """Return the number of calls by size, for each input and dimension."""
    places: dict[tuple[str, int], Counter[int]] = {}
    for sizes, count in sets.items():
        for key, shape in sizes:
            for i, size in enumerate(shape):
                places.setdefault((key, i), Counter())[size] += count
    return places.items()


def _varies(counts: Counter[int]) -> bool:
    sizes = counts.keys() - SPECIALIZED
    return len(sizes) > 2 or sum(4 * counts[size] >= counts.total() for size in sizes) > 1
